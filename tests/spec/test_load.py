import os
import threading

import pytest

from ftbench.errors import SpecError
from ftbench.spec.experiment import resolve
from ftbench.spec.incompatibilities import incompatibilities, machine_incompatibilities
from ftbench.spec.load import load
from ftbench.spec.methods import PROJECTIONS

MODEL = "model: {id: tiny/qwen3, weights: random}\n"
AMPERE, HOPPER = (8, 0), (9, 0)


@pytest.fixture
def files(tmp_path):
    """Return a function that writes spec files and returns their folder."""

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text, "utf-8")
        return tmp_path

    return write


@pytest.fixture
def spec(files):
    """Return a function that loads a spec of a tiny model with random weights."""

    def read(text="", *sets):
        return load(files(spec=MODEL + text) / "spec.yaml", sets)

    return read


@pytest.fixture
def problems(files):
    """Return a function that returns the error messages of a spec, without the folder."""

    def read(text, *sets):
        folder = files(spec=text)
        with pytest.raises(SpecError) as caught:
            load(folder / "spec.yaml", sets)
        assert caught.value.exit_code == 2
        return [problem.replace(f"{folder}/", "") for problem in caught.value.problems]

    return read


# --- values ----------------------------------------------------------------------------------------------------------


def test_controls_are_only_for_parity(problems):
    text = MODEL + "measure: {control: learning_rate_0}\n"
    (problem,) = problems(text)
    assert problem.startswith("spec.yaml:2: measure.control: learning_rate_0 ")
    assert "ftbench parity" in problem
    (problem,) = problems(MODEL, "measure.control=reversed_gradient")
    assert "--set measure.control" in problem


def test_model_is_the_only_required_key(files):
    spec = load(files(first="model: Qwen/Qwen3-8B\n") / "first.yaml")
    assert (spec.name, spec.model.id, spec.method.name, spec.dataset.name) == (
        "first",
        "Qwen/Qwen3-8B",
        "lora",
        "sample",
    )


def test_defaults_are_the_founding_study(spec):
    found = spec()
    assert (found.method.rank, found.method.alpha, found.method.dropout) == (8, 16, 0)
    assert found.method.targets == PROJECTIONS
    assert (found.train.max_grad_norm, found.train.optimizer, found.dataset.max_length) == (0.3, "adamw_torch", 2048)


def test_paths_are_relative_to_their_file(files, monkeypatch, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.yaml").write_text(MODEL + "dataset: {name: file, path: data.jsonl}\n")
    folder = files(spec="extends: sub/base.yaml\n")
    assert load(folder / "spec.yaml").dataset.path == str(tmp_path / "sub" / "data.jsonl")
    monkeypatch.chdir(tmp_path)
    assert load(folder / "spec.yaml", ["dataset.path=sub/../b.jsonl"]).dataset.path == str(tmp_path / "b.jsonl")


# --- extends and --set -----------------------------------------------------------------------------------------------


def test_precedence_of_extends_file_and_set(files):
    folder = files(
        a=MODEL + "train: {batch_size: 1, max_steps: 1, seed: 1}\n",
        b="extends: a.yaml\ntrain: {batch_size: 2, max_steps: 2}\n",
        c="extends: b.yaml\ntrain: {batch_size: 3}\n",
    )
    train = load(folder / "c.yaml", ["train.batch_size=4"]).train
    assert (train.batch_size, train.max_steps, train.seed) == (4, 2, 1)
    assert load(folder / "c.yaml").train.batch_size == 3


@pytest.mark.parametrize("circle", [{"a": "a"}, {"a": "b", "b": "c", "c": "a"}])
def test_circular_extends_is_an_error(files, circle):
    folder = files(**{name: f"{MODEL}extends: ./{base}.yaml\n" for name, base in circle.items()})
    with pytest.raises(SpecError, match="extend each other in a circle"):
        load(folder / "a.yaml")


@pytest.mark.parametrize("text", ["dataset.columns=[a", "dataset={name: 'sample}"])
def test_a_mapping_or_list_in_set_must_be_valid_yaml(problems, text):
    (message,) = problems(MODEL, text)
    assert message == f"--set {text}: the value is not valid YAML: check its brackets and quotes"


@pytest.mark.parametrize("text", ["train.batch_size", "=3", "train..x=3", "dataset.columns.a=b"])
def test_malformed_set_shows_the_syntax(problems, text):
    (message,) = problems(MODEL, text)
    assert message.startswith(f"--set {text}: write it as key.sub=value, for example train.batch_size=8 or ")


# --- changing method, dataset or model -------------------------------------------------------------------------------


def test_another_dataset_keeps_what_describes_the_training(spec):
    kept = {"samples": 32, "max_length": 64, "seed": 7, "eval_samples": 8, "loss_on": "all", "longest_first": True}
    written = ", ".join(f"{key}: {str(value).lower()}" for key, value in kept.items())
    data = spec(f"dataset: {{name: synthetic, length: 16, {written}}}\n", "dataset=alpaca").dataset
    assert {key: getattr(data, key) for key in kept} == kept
    assert (data.name, data.length) == ("alpaca", None)


def test_change_of_method_keeps_common_options(files):
    folder = files(
        base=MODEL + "method: {name: lora, rank: 32, targets: all-linear}\n", mine="extends: base.yaml\nmethod: qlora\n"
    )
    method = load(folder / "mine.yaml").method
    assert (method.name, method.rank, method.targets) == ("qlora", 32, "all-linear")


def test_change_of_method_drops_other_options(spec):
    text = "method: {name: qlora, rank: 32, double_quant: false}\n"
    found = spec(text, "method=lora")
    assert (found.method.name, found.method.rank) == ("lora", 32)
    assert spec(text, "method=full").method.model_dump() == {"name": "full"}
    assert spec(text, "method=lora", "method=qlora").method.double_quant is True


def test_change_of_model_drops_revision_and_path(files):
    folder = files(
        base=f"model: {{id: a/b, revision: main, dtype: bfloat16, path: {files()}}}\n",
        mine="extends: base.yaml\nmodel: c/d\n",
    )
    model = load(folder / "mine.yaml").model
    assert (model.id, model.revision, model.path, model.dtype) == ("c/d", None, None, "bfloat16")


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train: {bath_size: 3}", ["train.bath_size: ", "did you mean batch_size?", "allowed: batch_size, "]),
        ("trian: {seed: 3}", ["trian: ", "did you mean train?", "allowed: extends, recipe, sweep, name, model"]),
        ("method: {name: qlora, rnak: 3}", ["method.rnak: ", "did you mean rank?", "double_quant"]),
        ("method: qlorra", ["method: 'qlorra'", "did you mean qlora?", "allowed: full, lora, qlora, unsloth"]),
        ("train: {optimizer: adam_torch}", ["train.optimizer: 'adam_torch'", "did you mean adamw_torch?", "sgd"]),
        ("train: {batch_size: 0}", ["train.batch_size: 0 must be greater than or equal to 1"]),
        ("train: {batch_size: many}", ["train.batch_size: 'many' must be a whole number, without a unit"]),
        ("train: {learning_rate: fast}", ["train.learning_rate: 'fast' must be a number, without a unit"]),
        ("train: {batch_size: [1, 2]}", ["train.batch_size: [1, 2] is a list: ", "`sweep: {axes: {KEY: [...]}}`"]),
        ("method: [lora, qlora]", ["method: ['lora', 'qlora'] is a list: ", "`sweep: {axes: {KEY: [...]}}`"]),
        ("optimizations: [liger]", ["optimizations: ['liger'] is not a section: give it keys (allowed: activation"]),
        ("batch_size: 8", ["batch_size: no such key; did you mean train.batch_size? (allowed: extends, recipe, sweep"]),
        ("dataset: data/my.jsonl", ["is a file: write `dataset: {name: file, path: data/my.jsonl}`"]),
        ("train: {batch_size: yes}", ["train.batch_size: True must be a number, not on/yes/true"]),
        ("train: {epochs: .nan}", ["train.epochs: nan must be a finite number"]),
        ("train: {max_steps: 1.5}", ["train.max_steps: 1.5 must be a whole number"]),
        ("train: {seed: 4294967296}", ["train.seed: 4294967296 must be less than 4294967296"]),
        ("optimizations: {compile: 1}", ["optimizations.compile: 1 must be on or off, dynamic or lean"]),
        (
            "optimizations: {fp8: on}",
            ["optimizations.fp8: 'on' is not allowed", "off, tensorwise, tensorwise-fast, tensorwise-delayed"],
        ),
        ("measure: {warmup: some}", ["measure.warmup: 'some' must be auto or a whole number"]),
        ("measure: {warmup: -1}", ["measure.warmup: -1 must be auto or greater than or equal to 0"]),
        ("method: {name: lora, targets: q_proj}", ["method.targets: 'q_proj' must be all-linear or a list"]),
        ("method: {name: lora, targets: []}", ["method.targets: [] must be all-linear or have at least 1 item"]),
        ("dataset: japanese-alpca", ["dataset.name: 'japanese-alpca'", "did you mean japanese-alpaca?", "synthetic"]),
        ("name: 実験", ["name: '実験' may have up to 80 letters (a to z), digits"]),
        ("train: 5", ["train: 5 is not a section", "allowed: batch_size"]),
        ("train:", ["train: is empty: give it keys (allowed: batch_size", "or leave it out"]),
        ("lr: 1e-4", ["lr: no such key; did you mean train.learning_rate? (allowed: extends"]),
        ("on: 3", ["on: no such key"]),
    ],
)
def test_error_has_file_line_key_value_and_allowed(problems, text, parts):
    (message,) = problems(f"{MODEL}# a comment\n{text}\n")
    assert message.startswith("spec.yaml:3: ")
    assert [part for part in parts if part not in message] == []


def test_error_has_the_last_source_of_the_key(files):
    folder = files(
        base=MODEL + "train:\n  batch_size: 0\n  seed: -1\n", mine="extends: base.yaml\ntrain: {batch_size: -2}\n"
    )
    with pytest.raises(SpecError) as caught:
        load(folder / "mine.yaml", ["train.epochs=-3"])
    batch, epochs, seed = caught.value.problems
    assert batch.startswith(f"{folder / 'mine.yaml'}:2: train.batch_size: -2")
    assert epochs.startswith("--set train.epochs=-3: train.epochs: -3")
    assert seed.startswith(f"{folder / 'base.yaml'}:4: train.seed: -1")


def test_all_mistakes_are_reported(problems):
    message = problems(MODEL + "train: {batch_size: 0, seed: -1, bath: 2}\nmethod: {name: lora, rank: 0}\nfoo: 1\n")
    assert [problem.split(": ")[1] for problem in message] == [
        "method.rank",
        "train.batch_size",
        "train.seed",
        "train.bath",
        "foo",
    ]


def test_random_weights_need_a_known_shape(problems):
    (message,) = problems("model: {id: x/y, weights: random}\n")
    assert "the shape of x/y is unknown" in message
    assert "tiny/qwen3" in message


def test_a_pipe_with_a_slow_writer_is_a_spec(tmp_path):
    os.mkfifo(path := tmp_path / "spec.yaml")
    writer = threading.Timer(0.3, path.write_text, ["model: tiny/qwen3\n"])
    writer.start()
    assert load(path).model.id == "tiny/qwen3"
    writer.join()


def test_tiny_models_have_random_weights_by_default(files, tmp_path):
    folder = files(
        tiny="model: tiny/qwen3\n", other="model: Qwen/Qwen3-8B\n", own="model: {id: tiny/qwen3, path: here}\n"
    )
    weights = {name: load(folder / f"{name}.yaml").model.weights for name in ("tiny", "other", "own")}
    assert weights == {"tiny": "random", "other": "pretrained", "own": "pretrained"}
    assert load(folder / "tiny.yaml", ["model.weights=pretrained"]).model.weights == "pretrained"
    assert load(folder / "other.yaml", ["model=tiny/qwen3"]).model.weights == "random"


@pytest.mark.parametrize("revision", ["", "revision: main,", f"revision: {'G' * 40},"])
def test_remote_code_needs_a_commit(problems, revision):
    (message,) = problems(f"model: {{id: x/y, {revision} trust_remote_code: true}}\n")
    assert "40 hex digits of a commit" in message


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        ("{name: file}", "needs `path`"),
        ("{name: sample, path: x.jsonl}", "`path` goes with `name: file`, not with sample"),
        ("{name: sample, format: alpaca}", "`format` goes with `name: file or owner/name`, not with sample"),
        ("{name: synthetic, samples: 4}", "needs exactly one of `length`, `mean_length` and `like`"),
        ("{name: synthetic, samples: 4, length: 8, mean_length: 9}", "needs exactly one of"),
        ("{name: synthetic, length: 8}", "needs `samples`"),
        ("{name: sample, length: 8}", "`length` goes with `name: synthetic or images`, not with sample"),
        ("{name: synthetic, samples: 4, length: 64, max_length: 32}", "`length` 64 is larger than `max_length` 32"),
    ],
)
def test_conflicting_dataset_keys_are_errors(problems, dataset, sentence):
    (message,) = problems(f"{MODEL}dataset: {dataset}\n")
    assert message.startswith("spec.yaml:2: dataset: ")
    assert sentence in message


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "method: qlora\noptimizations: {fp8: tensorwise}",
            "optimizations.fp8 needs 16-bit base weights and method qlora",
        ),
        (
            "method: full\noptimizations: {fp8: tensorwise-delayed}",
            "optimizations.fp8 tensorwise-delayed supports only frozen layers, and method full has none",
        ),
        ("train: {precision: fp16}\noptimizations: {fp8: tensorwise}", "optimizations.fp8 needs train.precision bf16"),
        ("method: {name: lora, experts: on, dropout: 0.1}", "method.experts needs method.dropout 0"),
        ("measure: {eval: epoch}", "measure.eval: epoch needs dataset.eval_samples"),
        ("train: {warmup_steps: 2, lr_scheduler: constant}", "train.lr_scheduler constant ignores train.warmup_steps"),
        ("method: qlora\ntrain: {precision: fp16}", "set train.precision to bf16 or fp32"),
        ("method: {name: lora, targets: [q_proj, lm_head]}", "method.targets: lm_head cannot have an adapter"),
    ],
)
def test_impossible_combinations_are_errors(problems, text, sentence):
    (message,) = problems(f"{MODEL}{text}\n")
    assert message.startswith("spec.yaml: ")
    assert sentence in message


SCALED = "method: full\ntrain: {precision: fp16}\n"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fp16_needs_float32_weights(problems, dtype):
    (message,) = problems(f"model: {{id: a/b, dtype: {dtype}}}\n{SCALED}")
    assert "full fine-tuning with train.precision fp16 scales gradients" in message
    assert "set model.dtype to float32" in message


@pytest.mark.parametrize(("capability", "refused"), [((7, 5), False), (AMPERE, True), (HOPPER, True)])
def test_fp16_with_auto_dtype_is_checked_after_resolve(spec, capability, refused):
    found = spec(SCALED)
    assert incompatibilities(found) == []
    message = incompatibilities(resolve(found, capability))
    assert ["set model.dtype to float32" in sentence for sentence in message] == [True] * refused


# --- settings that depend on the machine -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "dtype", "precision"),
    [
        (None, "float32", "fp32"),
        ((7, 5), "float32", "fp32"),
        (AMPERE, "bfloat16", "bf16"),
    ],
)
def test_auto_is_bfloat16_if_supported(spec, capability, dtype, precision):
    found = resolve(spec("method: qlora"), capability)
    assert (found.model.dtype, found.method.compute_dtype, found.train.precision) == (dtype, dtype, precision)


@pytest.mark.parametrize("capability", [None, HOPPER])
@pytest.mark.parametrize(
    ("method", "precision"),
    [
        ("lora", "fp16"),
        ("{name: qlora, compute_dtype: float16}", "bf16"),
        ("{name: qlora, compute_dtype: float16}", "fp32"),
    ],
)
def test_resolve_keeps_explicit_values(files, capability, method, precision):
    text = f"model: {{id: a/b, dtype: float16}}\nmethod: {method}\ntrain: {{precision: {precision}}}\n"
    spec = load(files(spec=text) / "spec.yaml")
    assert resolve(spec, capability) == spec


@pytest.mark.parametrize(("capability", "have"), [(None, "this machine has no GPU"), (AMPERE, "this GPU has 8.0")])
def test_fp8_needs_a_supported_gpu(spec, capability, have):
    (message,) = machine_incompatibilities(spec("optimizations: {fp8: tensorwise}"), capability)
    assert "needs a GPU of compute capability 8.9 or higher" in message
    assert have in message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("optimizations: {attention: flash_attention_2}", "optimizations.attention"),
        ("train: {precision: fp16}", "train.precision"),
    ],
)
def test_gpu_settings_need_a_gpu(spec, text, key):
    (message,) = machine_incompatibilities(spec(text), None)
    assert message.startswith(key)
    assert machine_incompatibilities(spec(text), HOPPER) == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_varlen_needs_the_gpus_of_flash_attention(spec, precision):
    found = spec(f"optimizations: {{attention: varlen, packing: on}}\ntrain: {{precision: {precision}}}")
    (message,) = machine_incompatibilities(found, (7, 5))
    assert message == "optimizations.attention varlen needs compute capability 8.0: set it to sdpa"
    assert machine_incompatibilities(found, AMPERE) == []


@pytest.mark.parametrize(("capability", "dtype"), [(None, "bfloat16"), ((7, 5), "bfloat16"), (HOPPER, "float32")])
def test_auto_compute_dtype_is_that_of_the_model(spec, capability, dtype):
    assert resolve(spec("method: qlora", f"model.dtype={dtype}"), capability).method.compute_dtype == dtype


def test_mxfp4_with_an_explicit_dtype_works_after_resolve(spec):
    found = spec("method: {name: qlora, quant_type: mxfp4}", "model=openai/gpt-oss-20b", "model.dtype=bfloat16")
    assert incompatibilities(resolve(found, None)) == []


# --- gpt-oss ---------------------------------------------------------------------------------------------------------

MXFP4 = "method: {name: qlora, quant_type: mxfp4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: openai/gpt-oss-20b\nmethod: qlora\n", "published in mxfp4 and cannot be quantised again"),
        (f"model: Qwen/Qwen3-8B\n{MXFP4}}}\n", "the format of gpt-oss, and Qwen/Qwen3-8B is qwen3"),
        (f"model: openai/gpt-oss-20b\n{MXFP4}, double_quant: off}}\n", "are for nf4 and fp4"),
        (f"model: openai/gpt-oss-20b\n{MXFP4}, experts: on, rank: 4}}\n", "a multiple of 8, not 4"),
        (f"model: openai/gpt-oss-20b\n{MXFP4}}}\noptimizations: {{compile: on}}\n", "as one graph"),
        (f"model: {{id: openai/gpt-oss-20b, dtype: float16}}\n{MXFP4}}}\n", "computes in bfloat16"),
        ("model: openai/gpt-oss-20b\noptimizations: {attention: sdpa}\n", "attention sinks of gpt-oss"),
    ],
)
def test_unsupported_gpt_oss_settings_are_errors(problems, text, message):
    assert message in " ".join(problems(text))


def test_mxfp4_needs_compute_capability_8(files):
    text = f"model: openai/gpt-oss-20b\n{MXFP4}, experts: on}}\n"
    spec = load(files(spec=text) / "spec.yaml")
    assert machine_incompatibilities(resolve(spec, HOPPER), HOPPER) == []
    assert machine_incompatibilities(resolve(spec, None), None) == []
    assert "8.0 or higher" in " ".join(machine_incompatibilities(resolve(spec, (7, 5)), (7, 5)))


# --- a model by its path ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["models/my-qwen/config.json", "./models/my-qwen/"])
def test_model_path_gives_the_id(files, path):
    folder = files(own=f"model: {{path: {path}, weights: random}}\n")
    model = load(folder / "own.yaml").model
    assert (model.id, model.path) == ("my-qwen", str(folder / path))


# --- launch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "fix"),
    [
        ("gpus: 4, strategy: none", "launch.strategy: none is for one GPU and launch.gpus is 4: use one of ddp: "),
        ("strategy: ddp", "launch.strategy: ddp needs several GPUs and launch.gpus is 1: raise launch.gpus"),
        ("offload: optimizer", "launch.offload: optimizer needs several GPUs and launch.gpus is 1: raise launch.gpus"),
        ("gpus: 2, offload: params", "launch.offload: ddp does not support params (fsdp: params"),
        ("gpus: all", "launch.gpus: 'all' must be a whole number"),
        ("gpus: 3, nodes: 2", "launch.nodes: launch.gpus is 3, which 2 machines cannot share evenly"),
        ("gpus: 2, nodes: 2, mock: ok", "launch.mock supports one machine: set launch.nodes to 1"),
        ("gpus: 2, strategy: tp+fsdp", "launch.tp: 2 GPUs cannot form two or more groups of 2"),
        ("gpus: 4, tp: 2", "launch.tp needs strategy tp+fsdp, and launch.strategy is ddp: change one"),
        ("gpus: 2, strategy: ddp, pp: 2", "launch.pp needs strategy pp, and launch.strategy is ddp: change one"),
        ("schedule: zbv", "launch.schedule needs strategy pp, and launch.strategy is none: change one"),
        ("gpus: 7, pp: 2, tp: 2", "`gpus` is 7, but pp 2 x tp 2 uses 4: set gpus to 4"),
        ("pp: 2, split: [1, 2]", "launch.split: its sum is 3, and tiny/qwen3 has 2 layers: change it"),
        ("pp: 2, split: [2]", "launch.split has 1 numbers for 2 stages: give one"),
        (
            "pp: 2, strategy: pp+fsdp, schedule: zbv",
            "launch.schedule: zbv splits the backward pass, and",
        ),
    ],
)
def test_unsupported_launch_is_an_error_with_a_fix(problems, section, fix):
    assert any(fix in problem for problem in problems(f"{MODEL}launch: {{{section}}}\n"))


def test_more_stages_than_gpus_are_an_error_with_verl(problems):
    said = problems(f"{MODEL}dataset: {{samples: 8}}\nlaunch: {{gpus: 1, strategy: none, pp: 2, framework: verl}}\n")
    assert any("launch.pp needs strategy pp, and launch.strategy is none" in problem for problem in said)


@pytest.mark.parametrize(
    ("section", "strategy", "sizes"),
    [
        ("gpus: 2, strategy: pp", "pp", (2, 2, None, 1)),
        ("gpus: 4, pp: 2, micro_batches: 2", "pp+ddp", (4, 2, None, 2)),
        ("pp: 2, strategy: pp+fsdp", "pp+fsdp", (4, 2, None, 2)),
        ("gpus: 8, pp: 2, tp: 2, micro_batches: 4", "pp+tp+fsdp", (8, 2, 2, 2)),
        ("gpus: 8, strategy: pp+fsdp, pp: 2", "pp+fsdp", (8, 2, None, 4)),
        ("pp: 2, tp: 2", "pp+tp", (4, 2, 2, 1)),
        ("gpus: 8, strategy: pp+tp+fsdp", "pp+tp+fsdp", (8, 2, 2, 2)),
    ],
)
def test_numbers_of_a_pipeline_name_its_strategy(files, section, strategy, sizes):
    own = files(own=f"{MODEL}train: {{batch_size: 4}}\nlaunch: {{{section}}}\n") / "own.yaml"
    launch = load(own).launch
    assert (launch.strategy, (launch.gpus, launch.pp, launch.tp, launch.data_parallel_size)) == (strategy, sizes)
    assert type(launch).model_validate(launch.model_dump()) == launch


def test_mesh_can_be_changed_by_set(files):
    own = files(own="model: {id: a/b}\nlaunch: {gpus: 8, strategy: tp+fsdp}\n") / "own.yaml"
    launch = load(own).launch
    assert (launch.strategy, launch.gpus, launch.tp, launch.data_parallel_size) == ("tp+fsdp", 8, 2, 4)
    assert load(own, ["launch.gpus=6"]).launch.data_parallel_size == 3
    other = load(own, ["launch.gpus=2", 'launch.strategy="tp"', "launch.tp=off"]).launch  # as an estimate prints it
    assert (other.strategy, other.gpus, other.tp) == ("tp", 2, None)


@pytest.mark.parametrize(
    ("strategy", "section", "fix"),
    [
        ("fsdp", "method: qlora", "launch.strategy: fsdp cannot shard 4-bit weights"),
        ("tp", "optimizations: {fused_lora: on}", "tp splits them: set it to off, or use ddp or fsdp"),
        (
            "zero3",
            "optimizations: {fp8: tensorwise, compile: on}",
            "zero3 shards them: set it to off, or use ddp",
        ),
        ("fsdp", "optimizations: {gradient_checkpointing: offload}", "fsdp keeps the inputs of layers on the GPU"),
        ("fsdp", "train: {optimizer: adamw_bnb_8bit}", "bitsandbytes does not support the sharded tensors of fsdp"),
        ("tp", "train: {optimizer: adamw_torch_fused}", "which tp has: set it to adamw_torch"),
        ("fsdp", "measure: {gradients: 2}", "set it to 0, or use ddp"),
        ("ep", "method: {name: lora, experts: on}", "ep does not support adapters of experts"),
        ("cp", "optimizations: {packing: on}", "ignores the boundaries between the samples of a row: set it to off"),
        (
            "cp",
            "optimizations: {chunked_loss: on}",
            "optimizations.chunked_loss with cp: it needs complete rows",
        ),
        ("cp", "optimizations: {attention: eager}", "cp supports torch's own attention, not eager: set it to sdpa"),
        ("pp", "optimizations: {liger: on}", "liger was not tested with the stages of pp: set it to off, or use fsdp"),
    ],
)
def test_strategy_incompatibilities_have_a_fix(problems, strategy, section, fix):
    text = f"{MODEL}launch: {{gpus: 2, strategy: {strategy}}}\n{section}\n"
    assert any(fix in problem for problem in problems(text)), list(problems(text))


def test_file_name_that_cannot_be_a_folder_needs_a_name(tmp_path):
    path = tmp_path / "私の実験.yaml"
    path.write_text("model: tiny/qwen3\nmethod: lora\n")
    with pytest.raises(
        SpecError, match=r"私の実験\.yaml: the default name is the name of the file.* write `name: my-run` into it$"
    ):
        load(path)
    assert load(path, ["name=mine"]).name == "mine"
