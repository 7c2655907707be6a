"""Other frameworks on the same tokens: prepared data, recorded facts, and real runs.

Real runs need the environments in the folder FTBENCH_FRAMEWORKS.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from datasets.formatting import NumpyFormatter
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import SequentialSampler
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.models.qwen3 import modeling_qwen3

from conftest import spec_of
from ftbench.errors import FtbenchError, MissingError, NotAppliedError
from ftbench.spec.frameworks import FRAMEWORKS
from ftbench.store import rundir
from ftbench.store.steps import read_steps
from ftbench.worker import __main__ as worker
from ftbench.worker import frameworks
from ftbench.worker.data.tokens import Tokens
from ftbench.worker.frameworks import live, prepare, session
from ftbench.worker.measure.batch_count import COUNT, padding_of
from ftbench.worker.outcome import Phases, of_exception
from ftbench.worker.training_run import TrainingRun

THROUGH_TRAINER = [name for name, each in FRAMEWORKS.items() if not each.own_loop]
LLAMA = {"framework": "llamafactory", "python": "/nowhere/bin/python"}
PLACE = Path(os.environ.get("FTBENCH_FRAMEWORKS", "/nowhere"))
TOLERANCE = 1e-5  # of a first loss near 7.6 in float32, for other kernels and another order of sums


def small_model():
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    )


def rows(lengths):
    return [[Tokens([7 * index + place for place in range(length)], [-100] * 2 + [1] * (length - 2), length)]
            for index, length in enumerate(lengths)]  # fmt: skip


def order_hash(folder, numbers):
    return session.order_hash_of(load_from_disk(str(folder))["train"]["input_ids"], numbers)


def test_draw_adapters_repeats_the_draws_of_peft():
    torch.manual_seed(0)
    model = small_model()
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    set_seed(5)
    wanted = {name: value.clone() for name, value in get_peft_model(model, config).named_parameters() if "lora" in name}
    torch.manual_seed(0)
    other = get_peft_model(small_model(), config)
    with torch.no_grad():
        for name, value in other.named_parameters():
            if "lora" in name:
                value.fill_(3.0)
    session.draw_adapters(other, 5)
    drawn = dict(other.named_parameters())
    assert all(torch.equal(drawn[name], value) for name, value in wanted.items())
    session.draw_adapters(other, 6)
    assert not torch.equal(dict(other.named_parameters())[next(iter(wanted))], next(iter(wanted.values())))


def test_write_rows_keeps_rows_and_order(tmp_path):
    given = rows([3, 5, 4])
    prepare.write_rows(tmp_path / "train", given)
    saved = load_from_disk(str(tmp_path / "train"))["train"]
    assert [list(ids) for ids in saved["input_ids"]] == [list(row[0].ids) for row in given]
    assert [list(labels) for labels in saved["labels"]] == [list(row[0].labels) for row in given]
    assert "lengths" not in saved.column_names
    prepare.write_rows(tmp_path / "swift", given, with_lengths=True)
    assert load_from_disk(str(tmp_path / "swift"))["train"]["lengths"][:] == [[3], [5], [4]]
    order = order_hash(tmp_path / "train", range(3))
    assert order != order_hash(tmp_path / "train", range(2))
    prepare.write_rows(tmp_path / "other", [given[1], given[0], given[2]])
    assert order != order_hash(tmp_path / "other", range(3))


def test_rows_are_read_without_torchvision(tmp_path, monkeypatch):
    """datasets 4.0.0, which LLaMA-Factory needs, imports a name that torchvision 0.26 removed."""

    def broken(*_):
        raise ImportError("cannot import name 'VideoReader' from 'torchvision.io'")

    prepare.write_rows(tmp_path / "train", given := rows([3, 5]))
    monkeypatch.setattr(NumpyFormatter, "recursive_tensorize", broken)
    tokens = b"".join(np.asarray(row[0].ids, dtype=np.int64).tobytes() for row in (*given, given[0]))
    assert order_hash(tmp_path / "train", range(3)) == hashlib.sha256(tokens).hexdigest()


def test_counted_collator_counts_its_samples():
    def collate(features):
        longest = 8
        pad = [feature["input_ids"] + [0] * (longest - len(feature["input_ids"])) for feature in features]
        labels = [feature["labels"] + [-100] * (longest - len(feature["labels"])) for feature in features]
        return {"input_ids": torch.tensor(pad), "labels": torch.tensor(labels)}

    features = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [-100, 5]}]
    count = session.counted(collate)(features)[COUNT]
    assert (count.real, count.padded, count.labels, count.samples, count.longest) == (5, 16, 3, 2, 3)


def test_counted_collator_counts_packed_samples():
    def collate(features):
        laid = [token for row in features for sample in row for token in sample["input_ids"]]
        return {"input_ids": torch.tensor([laid]), "labels": torch.tensor([laid])}

    packed = [[{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], [{"input_ids": [6]}]]
    count = session.counted(collate)(packed)[COUNT]
    assert (count.real, count.padded, count.samples, count.longest, len(count.tokens)) == (6, 6, 3, 3, 3)
    assert padding_of({(count.samples, count.longest, count.padded)}) == "samples end to end"


@pytest.mark.parametrize("multiple", [None, 8, 64])
def test_padding_is_detected_from_batch_shapes(multiple):
    """Use the batches of transformers' own collator."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<pad>": 0})), pad_token="<pad>")
    collate = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=multiple)
    shapes = set()
    for longest in (3, 9, 65, 66, 190):
        batch = collate([{"input_ids": [1] * length, "labels": [1] * length} for length in (2, longest)])
        shapes.add((2, longest, batch["input_ids"].numel()))
    assert padding_of(shapes) == ("to the longest of a batch" if multiple is None else f"to a multiple of {multiple}")
    assert padding_of({(2, 30, 256), (2, 90, 256)}) == "to 128 tokens"
    assert padding_of([]) is None


def test_patched_by_finds_foreign_functions(monkeypatch):
    model = get_peft_model(small_model(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert live.patched_by(model) == set()

    def forward(self, states):
        return states

    forward.__module__ = "fast_kernels.norm"
    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", forward)
    assert live.patched_by(model) == {"fast_kernels"}
    monkeypatch.undo()
    rotate = types.FunctionType(forward.__code__, {})
    rotate.__module__ = "other_kernels"
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", rotate)
    assert live.patched_by(model) == {"other_kernels"}


def test_wrong_quantisation_is_a_problem():
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(small_model(), config)
    spec = spec_of(method={"name": "qlora", "rank": 8, "targets": ["q_proj"]}, launch=LLAMA)
    assert live.model_problems(model, spec) == ["llamafactory: method is qlora, but the weights are not quantised"]
    layer = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    layer.weight.quant_state = types.SimpleNamespace(quant_type="nf4", nested=True)
    layer.compute_dtype = getattr(torch, spec.method.compute_dtype)
    assert live.model_problems(model, spec) == []
    layer.weight.quant_state.quant_type, layer.compute_dtype = "fp4", torch.float16
    (problem,) = live.model_problems(model, spec)
    assert problem.endswith("the weights are fp4 with double_quant, computed in float16")


def test_other_rank_or_alpha_is_a_problem():
    config = LoraConfig(r=8, lora_alpha=12, target_modules=["q_proj"], task_type="CAUSAL_LM")  # some frameworks round
    model = get_peft_model(small_model(), config)
    method = {"name": "lora", "rank": 8, "targets": ["q_proj"]}
    assert live.model_problems(model, spec_of(method=method | {"alpha": 12}, launch=LLAMA)) == []
    for wanted, text in (({"alpha": 12.5}, "rank is 8 and alpha 12.5"), ({"rank": 4, "alpha": 6}, "rank is 4")):
        (problem,) = live.model_problems(model, spec_of(method=method | wanted, launch=LLAMA))
        assert text in problem
        assert problem.endswith("but adapters have rank 8 and alpha 12")


@pytest.mark.parametrize("name", THROUGH_TRAINER)
def test_configuration_has_the_quantisation(name):
    method = {"name": "qlora", "quant_type": "fp4", "double_quant": False, "compute_dtype": "float32"}
    values = frameworks.load(name).configuration(spec_of(method=method), "data/model")
    settings = values | values.get("bnb_config_kwargs", {})
    assert "fp4" in (settings.get("bnb_4bit_quant_type"), settings.get("quantization_type"))
    assert False in (settings.get("bnb_4bit_use_double_quant"), settings.get("double_quantization"))


@pytest.mark.parametrize("name", THROUGH_TRAINER)
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_configuration_is_json_with_the_training_settings(name, method):
    train = {"max_steps": 3, "batch_size": 6, "learning_rate": 0.25, "weight_decay": 0.125, "warmup_steps": 7,
             "seed": 5, "max_grad_norm": 0.75, "gradient_accumulation_steps": 11, "lr_scheduler": "cosine"}  # fmt: skip
    adapters = {"rank": 9, "alpha": 13, "dropout": 0.375} if method != "full" else {}
    spec = spec_of(method={"name": method} | adapters, train=train)
    values = frameworks.load(name).configuration(spec, "data/model")
    assert json.loads(json.dumps(values)) == values
    assert all(each in values.values() for each in (*train.values(), *adapters.values(), "data/model"))
    assert name != "ms-swift" or values["check_model"] is False
    assert not any("/" in str(value) and Path(str(value)).is_absolute() for value in values.values())


@pytest.mark.parametrize("name", THROUGH_TRAINER)
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_best_settings_differ_from_plain(name, method):
    python = {"framework": name, "python": "/nowhere/bin/python", "settings": "best"}
    spec = spec_of(method={"name": method}, launch=python)
    flash = spec_of(method={"name": method}, launch=python, optimizations={"attention": "flash_attention_2"})
    framework = frameworks.load(name)
    plain, best = framework.configuration(spec, "data/model"), framework.best(spec)
    assert {key for key in best if "liger" in str(best[key]) or ("liger" in key and best[key])}
    assert all(plain.get(key, False) != value for key, value in best.items() if value)
    packed = framework.best(flash).keys() - best.keys()
    assert packed == {
        "axolotl": {"sample_packing", "sample_packing_sequentially", "pad_to_sequence_len"}, "llamafactory": set(),
        "ms-swift": {"packing", "packing_strategy"},
    }[name]  # fmt: skip
    if name == "axolotl":
        assert best["lora_mlp_kernel"] is best["lora_qkv_kernel"] is best["lora_o_kernel"] is (method != "full")


@pytest.mark.parametrize(("framework", "handed_over", "acquired"), [("trl", False, 1), ("llamafactory", False, 0),
                                                                    ("llamafactory", True, 1)])  # fmt: skip
def test_only_the_training_interpreter_acquires_the_gpu(tmp_path, monkeypatch, framework, handed_over, acquired):
    directory = rundir.create(tmp_path, "tests", "turns")
    launch = {"launch": LLAMA} if framework != "trl" else {}
    rundir.write_json(directory.spec_json, spec_of(**launch).model_dump(mode="json"))
    rundir.write_json(directory.machine, {"gpus": []})
    turns = []
    monkeypatch.setattr(worker.signal, "signal", lambda *handler: None)
    monkeypatch.setattr(worker.gpu_lock, "acquire", lambda *given: turns.append(given))
    monkeypatch.setattr(worker, "_loop", lambda spec, handed_over: lambda run: None)
    assert worker.main(str(directory.path), handed_over) == 0
    assert len(turns) == acquired


def test_imports_do_not_leave_garbage_collection_off(monkeypatch):
    collecting = []

    def import_module(name):
        collecting.append(gc.isenabled())
        raise ImportError(name)

    monkeypatch.setattr(worker.importlib, "import_module", import_module)
    with pytest.raises(ImportError, match=r"ftbench.worker.train$"):
        worker._loop(spec_of(), False)
    assert collecting == [False]
    assert gc.isenabled()


# --- a stand-in for a framework, in this process ----------------------------------------------------------------------


class Ordered(Trainer):
    def _get_train_sampler(self, *args):
        return SequentialSampler(self.train_dataset)


def padded(features):
    longest = max(len(feature["input_ids"]) for feature in features)
    pad = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.tensor([feature[name] + [value] * (longest - len(feature[name])) for feature in features])
        for name, value in pad.items()
    }


@pytest.fixture
def framework_run(tmp_path, monkeypatch):
    """Return a function that trains a stand-in for a framework in a prepared run directory.

    `given` overrides its training arguments, `pick` changes its rows.
    """

    def train(given=None, pick=list, launch=None, behave=None, length=(("max_steps", 3),)):
        method, launched = {"rank": 8, "targets": ["q_proj"]}, LLAMA | (launch or {})
        spec = spec_of(method=method, train=dict(length) | {"batch_size": 2}, launch=launched)
        directory = rundir.create(tmp_path, "tests", "framework")
        rundir.write_json(directory.machine, {"gpus": []})
        rundir.write_json(directory.framework, {})
        prepare.write_rows(directory.path / frameworks.DATA, rows([4, 6, 5, 7, 4, 8, 6, 5]))
        run = TrainingRun(spec, directory, Phases(directory, "import"))

        def trainer(values):
            recipe = {
                "output_dir": frameworks.OUTPUT, "per_device_train_batch_size": 2, "max_steps": 3, "use_cpu": True,
                "optim": spec.train.optimizer,
                "learning_rate": spec.train.learning_rate, "max_grad_norm": spec.train.max_grad_norm,
                "lr_scheduler_type": spec.train.lr_scheduler, "report_to": "none", "save_strategy": "no",
                "logging_strategy": "no", "remove_unused_columns": False, "seed": spec.train.seed, "disable_tqdm": True,
            }  # fmt: skip
            data = [
                {name: row[name] for name in ("input_ids", "attention_mask", "labels")}
                for row in load_from_disk(frameworks.DATA)["train"]
            ]
            config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], task_type="CAUSAL_LM")
            model = get_peft_model(small_model(), config)
            arguments = TrainingArguments(**recipe | (given or {}))
            Ordered(model=model, args=arguments, train_dataset=pick(data), data_collator=padded).train()

        stand_in = types.SimpleNamespace(train=behave or trainer, best=lambda spec: {"enable_liger_kernel": True})
        monkeypatch.setattr(session.frameworks, "load", lambda name: stand_in)
        monkeypatch.setattr(session.importlib.metadata, "version", lambda package: "0.9.5")
        monkeypatch.chdir(tmp_path)  # training goes into the run's directory
        session.train(run)
        return rundir.read_json(directory.applied), read_steps(directory.steps)[0]

    return train


def test_session_records_steps_and_facts(framework_run):
    applied, steps = framework_run()
    assert [step.real_tokens for step in steps] == [10, 12, 12]
    assert applied["framework"] == {"name": "llamafactory", "version": "0.9.5", "settings": "plain", "switched_on": {}}
    assert applied["trained_dtype"] == "float32"
    assert applied["padding"] == "to the longest of a batch"
    assert applied["fp8_layers"] == 0
    assert applied["loss_normalisation"] == "label tokens of the step"
    assert "warnings" not in applied


def test_framework_may_convert_epochs_to_steps(framework_run):
    """axolotl does. The data set has eight rows."""
    epochs = [("epochs", 1)]
    _, steps = framework_run({"max_steps": 4, "num_train_epochs": 1}, length=epochs)
    assert len(steps) == 4
    with pytest.raises(NotAppliedError, match=r"train\.epochs is 1.0, but it trains with 2"):
        framework_run({"max_steps": -1, "num_train_epochs": 2}, length=epochs)


def test_loss_normalisation_notes_extra_tokens(framework_run, monkeypatch):
    """transformers 4 counts labels before the shift, so it includes the first token of each row."""

    def every_label(self, batches, device):
        return sum((batch["labels"] != -100).sum() for batch in batches)

    monkeypatch.setattr(Ordered, "_get_num_items_in_batch", every_label)
    applied, steps = framework_run(pick=lambda data: [row | {"labels": row["input_ids"]} for row in data])
    assert applied["loss_normalisation"] == "label tokens of the step, and first tokens of rows"
    assert [step.label_tokens for step in steps] == [8, 10, 10]


def test_each_ignored_setting_fails_the_run(framework_run):
    given = {
        "learning_rate": 0.5, "warmup_steps": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
        "max_grad_norm": 9.0, "weight_decay": 0.5, "optim": "sgd", "lr_scheduler_type": "cosine", "max_steps": 2,
        "seed": 1, "bf16": True, "gradient_checkpointing": True,
    }  # fmt: skip
    with pytest.raises(NotAppliedError) as error:
        framework_run(given, launch={"settings": "best"})
    for said in (
        "llamafactory: train.learning_rate is 0.001, but it trains with 0.5",
        "train.warmup_steps is 0, but it trains with 2",
        "train.batch_size is 2, but it trains with 1",
        "train.gradient_accumulation_steps is 1, but it trains with 2",
        "train.max_grad_norm is 0.3, but it trains with 9.0",
        "train.weight_decay is 0.0, but it trains with 0.5",
        "train.optimizer is adamw_torch, but it trains with sgd",
        "train.lr_scheduler is linear, but it trains with cosine",
        "train.max_steps is 3, but it trains with 2",
        "train.seed is 42, but it trains with 1",
        "train.precision is fp32, but it trains with bf16",
        "optimizations.gradient_checkpointing is off, but it trains with on",
        "llamafactory: launch.settings is best, but no module uses a kernel of Liger",
    ):
        assert said in str(error.value)


@pytest.mark.parametrize(
    "pick",
    [
        lambda data: [data[index] for index in (1, 0, 2, 3, 4, 5)],
        lambda data: [*data[:2], *data[3:]],
        lambda data: [{name: value[:4] for name, value in row.items()} for row in data],
    ],
    ids=["swapped", "dropped", "truncated"],
)
def test_other_rows_are_a_warning(framework_run, pick):
    applied, _ = framework_run(pick=pick)
    (warning,) = applied["warnings"]
    assert warning.startswith("not the same work: llamafactory did not train on the given rows")


def test_framework_that_does_not_train_is_an_error(framework_run):
    with pytest.raises(FtbenchError, match="llamafactory ended without training: "):
        framework_run(behave=lambda values: None)


def test_failed_framework_gives_its_message(framework_run):
    def broken(values):
        sys.exit("argument --flash_attn: invalid choice")

    with pytest.raises(SystemExit) as ended:
        framework_run(behave=broken)
    outcome = of_exception(ended.value, "load", None)
    assert outcome["state"] == "error"
    assert "invalid choice" in outcome["reason"]


@pytest.mark.parametrize(("values", "said"), [
    ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "lacks weights of"),
    ({"intermediate_size": 48}, "have other shapes than"),
])  # fmt: skip
def test_incomplete_checkpoint_is_an_error(framework_run, tmp_path, values, said):
    folder = tmp_path / "model"
    small_model().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(MissingError, match=said):
        framework_run(behave=lambda read: AutoModelForCausalLM.from_pretrained(folder))


# --- real frameworks --------------------------------------------------------------------------------------------------


def run_both(name, text, folder, *more):
    """Yield applied.json and the steps of a run with trl, and of a run with the framework and `more` settings."""
    python = PLACE / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment with {name}: FTBENCH_FRAMEWORKS names no folder with {name}/bin/python")
    spec = folder / "same.yaml"
    spec.write_text(text)
    for launch in ([], [f"launch.framework={name}", f"launch.python={python}", *more]):
        sets = [part for change in launch for part in ("--set", change)]
        command = [sys.executable, "-m", "ftbench", "run", str(spec), "--json", "--out", str(folder / "out"), *sets]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        made = Path(json.loads(ended.stdout)["run_dir"])
        yield json.loads((made / "applied.json").read_text()), read_steps(made / "steps.csv")[0]


@pytest.mark.frameworks
@pytest.mark.parametrize("name", THROUGH_TRAINER)
@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_framework_trains_the_same_tokens_from_the_same_weights(name, method, tmp_path):
    text = (
        "model: {id: tiny/qwen3, weights: random}\ndataset: {name: sample, samples: 32, max_length: 128}\n"
        f"method: {method}\ntrain: {{max_steps: 4, batch_size: 2}}\n"
    )
    (ours, our_steps), (theirs, their_steps) = run_both(name, text, tmp_path)
    assert theirs["dataset"]["order_hash"] == ours["dataset"]["order_hash"]
    assert theirs["parameters"]["trainable"] == ours["parameters"]["trainable"]
    assert their_steps[0].loss == pytest.approx(our_steps[0].loss, abs=TOLERANCE)
    # trl keeps the adapters of a quantised model in bfloat16, the frameworks in float32
    assert theirs["trained_dtype"] == "float32"
    rounding = 1e-4 if ours["trained_dtype"] == "float32" else torch.finfo(torch.bfloat16).eps
    assert their_steps[0].grad_norm == pytest.approx(our_steps[0].grad_norm, rel=rounding)
    assert [step.real_tokens for step in their_steps] == [step.real_tokens for step in our_steps]
    assert not any("not the same work" in warning for warning in theirs["warnings"])


@pytest.mark.frameworks
def test_llamafactory_also_divides_by_first_tokens(tmp_path):
    """Use float32, because 16 bits cannot show such a small difference."""
    text = (
        "model: {id: tiny/qwen3, weights: random, dtype: float32}\n"
        "dataset: {name: synthetic, samples: 16, length: 128}\nmethod: lora\n"
        "train: {max_steps: 2, batch_size: 4, precision: fp32}\n"
    )
    (_, our_steps), (theirs, their_steps) = run_both("llamafactory", text, tmp_path)
    assert theirs["loss_normalisation"] == "label tokens of the step, and first tokens of rows"
    share = 4 * 127 / (4 * 128)
    assert their_steps[0].loss / our_steps[0].loss == pytest.approx(share, rel=1e-6)
    assert their_steps[0].grad_norm / our_steps[0].grad_norm == pytest.approx(share, rel=1e-4)
