"""`ftbench estimate`: memory, verdicts, errors, and speed of the command."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from counting import calls_of
from ftbench.core import table
from ftbench.core.hardware import find_gpu, gpus
from ftbench.errors import SpecError
from ftbench.estimate import api
from ftbench.estimate.estimates import EstimateRequest, estimate
from ftbench.estimate.gpus import capacity, gpus_named
from ftbench.estimate.memory.estimate import Band, constants, estimate_memory, verdict_of
from ftbench.estimate.memory.largest_batch import MemoryCache, _largest_within, with_batch
from ftbench.estimate.time.duration import estimate_duration
from ftbench.estimate.time.rates import STATES, WEIGHTS, step
from ftbench.estimate.time.work import StepWork
from ftbench.estimate.workload.batches import batches_of
from ftbench.estimate.workload.largest import BatchShape, Largest, largest
from ftbench.estimate.workload.lengths import Lengths, sample_lengths
from ftbench.estimate.workload.model import trainable_shape
from ftbench.estimate.workload.sharding import on_gpus
from ftbench.facts import architectures
from ftbench.spec.batches import synthetic_lengths
from ftbench.spec.experiment import Experiment
from ftbench.spec.load import load, recipe
from ftbench.store.rundir import find_runs

H200 = next(gpu for gpu in gpus() if gpu.name == "H200 SXM")


def spec(**changes: object) -> Experiment:
    values = {
        "name": "x",
        "model": {"id": "Qwen/Qwen3-8B", "weights": "random"},
        "method": {"name": "lora"},
        "dataset": {"name": "synthetic", "samples": 64, "length": 2048},
    }
    return Experiment.model_validate({**values, **changes})


# GiB that the worker's own code allocated on fake tensors (torch 2.13) for 4 samples of 2,048 tokens: Qwen3-8B, or
# Qwen3-0.6B trained in full.
RECORDED = [
    ("lora", {"fused_lora": True, "chunked_loss": True}, 76.561),
    ("lora", {"fused_lora": True}, 73.647),
    ("lora", {"gradient_checkpointing": True, "chunked_loss": True}, 21.598),
    ("lora", {"gradient_checkpointing": True, "chunked_loss": True, "fused_lora": True}, 21.831),
    ("lora", {"gradient_checkpointing": True, "chunked_loss": 256}, 20.381),
    ("lora", {"gradient_checkpointing": True, "chunked_loss": 256, "fused_lora": True}, 20.239),
    ("qlora", {"chunked_loss": True}, 90.78),
    ("qlora", {"chunked_loss": True, "fused_lora": True}, 84.07),
    ("16-bit qlora", {"chunked_loss": True}, 61.32),
    ("16-bit qlora", {"chunked_loss": True, "fused_lora": True}, 61.36),
    ("16-bit qlora", {"chunked_loss": 256, "gradient_checkpointing": True}, 9.97),
    ("full", {"chunked_loss": True}, 22.59),
    ("full", {"chunked_loss": 256, "gradient_checkpointing": True}, 5.61),
    ("full, 8-bit states", {"chunked_loss": 256, "gradient_checkpointing": True}, 4.93),
    ("full, 8-bit states", {"chunked_loss": 256, "gradient_checkpointing": True, "optimizer_in_backward": True}, 4.55),
]


@pytest.mark.parametrize(("method", "on", "gib"), RECORDED)
def test_terms_add_up_to_the_memory_that_the_worker_allocated(method: str, on: object, gib: float) -> None:
    upcast = {"upcast": False} if method == "16-bit qlora" else {}
    name = "Qwen/Qwen3-0.6B" if method.startswith("full") else "Qwen/Qwen3-8B"
    kind = "full" if method.startswith("full") else method.split()[-1]
    states = {"optimizer": "adamw_bnb_8bit", "max_grad_norm": 0} if "states" in method else {}
    one = spec(model={"id": name, "weights": "random"}, method={"name": kind, **upcast}, optimizations=on,
               train={"batch_size": 4, "precision": "bf16", **states})  # fmt: skip
    assert estimate_memory(one, H200).allocated.expected == pytest.approx(gib, rel=0.015)


def at_batch_4(name: str, **more: object) -> Experiment:
    one = Experiment.model_validate({**spec(**more).model_dump(), **recipe(name, Path())})
    return one.model_copy(update={"train": one.train.model_copy(update={"batch_size": 4})})


def test_the_range_includes_a_small_context_and_the_unmeasured_memory_of_pairs() -> None:
    memory, pairs = (estimate_memory(spec(**on), H200) for on in ({}, {"objective": {"name": "dpo"}}))
    assert memory.device.low - memory.reserved.low < 0.5
    assert memory.allocated.high < 1.01 * memory.allocated.expected
    assert pairs.allocated.high > 1.05 * pairs.allocated.expected


def test_the_small_recipe_needs_the_sum_of_its_tensors() -> None:
    """7.44 GiB: its tensors followed one by one through a step."""
    assert estimate_memory(at_batch_4("small"), H200).allocated.expected == pytest.approx(7.44, rel=0.03)


def test_triton_kernels_keep_copied_values_and_no_scales() -> None:
    """Of 8,192 positions in 36 layers: 1,024 values; scales of both norms, of 32 heads and of 8; 4,096 in float32."""
    fastest = at_batch_4("fastest")
    on, off = (fastest.optimizations.model_copy(update={"triton_kernels": value}) for value in (True, False))
    shape = BatchShape(1, 8192, 8188)
    whole = Largest(shape, shape, False, True, "whole rows")
    plain, ours = (estimate_memory(each, H200, batch=whole)
                   for each in (fastest.model_copy(update={"optimizations": each}) for each in (off, on)))  # fmt: skip
    more = 8192 * (36 * (2 * 1024 - 4 * (2 + 32 + 8)) - 2 * 4096) / 2**30
    assert ours.allocated.expected - plain.allocated.expected == pytest.approx(more, rel=0.02)


def test_a_fused_fp8_mlp_keeps_no_product_of_its_gate() -> None:
    """Of 8,192 positions in 36 layers: 12,288 values of 16 bits; adapters of many columns go without."""
    shape = BatchShape(1, 8192, 8188)
    whole = Largest(shape, shape, False, True, "whole rows")

    def peak(fp8: str, rank: int) -> float:
        given = at_batch_4("fastest-fp8")
        on = given.optimizations.model_copy(update={"triton_kernels": True, "fp8": fp8, "cuda_graph": False})
        method = given.method.model_copy(update={"rank": rank})
        changed = given.model_copy(update={"optimizations": on, "method": method})
        return estimate_memory(changed, H200, batch=whole).allocated.expected

    less = 36 * 8192 * 12288 * 2 / 2**30
    assert peak("tensorwise-fast", 16) - peak("tensorwise-delayed", 16) == pytest.approx(less, rel=0.02)
    assert peak("tensorwise-fast", 17) == peak("tensorwise-delayed", 17)


def test_triton_kernels_are_estimated_for_supported_models_only() -> None:
    other = spec(model={"id": "openai/gpt-oss-20b", "weights": "random"}, optimizations={"triton_kernels": True})
    with pytest.raises(SpecError, match=r"triton_kernels does not support gpt_oss: set it to off"):
        estimate_memory(other, H200)


# Of Qwen3-8B, by hand: q and o, k and v, gate, up and down of a layer; the words' table.
MATRICES, WORDS = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288, 151_936 * 4096
# Copies by fused_lora of adapters of rank 8: A, B, and B block by block for q, k, v and for gate, up.
COPIES = 36 * 8 * (9 * 4096 + 38912 + (3 * 6144 + 4096 + 2 * 24576 + 4096)) * 2 / 2**30
NF4 = (1 / 2 + 1 / 64) / 2**30  # GiB a weight: four bits, and a byte for 64 of them


@pytest.mark.parametrize(
    ("name", "buffers", "on_host"),
    [
        ("smallest", 2 * MATRICES * NF4, 36 * MATRICES * NF4 + 2 * WORDS * 2 / 2**30),
        ("smallest-exact", 2 * MATRICES * 2 / 2**30 + COPIES, (36 * MATRICES + 2 * WORDS) * 2 / 2**30),
    ],
)
def test_weight_offload_keeps_two_layers_and_the_head(name, buffers, on_host) -> None:
    found = estimate_memory(at_batch_4(name), H200)
    assert found.parts["weights"] == pytest.approx(buffers, rel=0.03)
    assert found.parts["head"] == pytest.approx(WORDS * 2 / 2**30, rel=0.03)
    kept = 36 * 4 * 2048 * 4096 * 2 / 2**30  # checkpoints
    assert found.host == pytest.approx(1.9 + kept + on_host, rel=0.02)
    assert found.allocated.high < {"smallest": 3.5, "smallest-exact": 4.5}[name]


def test_full_training_of_8b_with_weights_and_states_on_the_host_needs_less_than_6_gib() -> None:
    found = estimate_memory(at_batch_4("smallest-full"), H200)
    assert found.allocated.high < 6
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    total = 36 * MATRICES + 2 * WORDS + norms
    assert found.parts["weights"] == pytest.approx((2 * MATRICES + norms) * 2 / 2**30, rel=0.001)
    assert "optimizer state" not in found.parts
    kept = 36 * 4 * 2048 * 4096 * 2  # checkpoints
    states = 2 * total * (1 + 4 / 256)
    assert found.host == pytest.approx(1.9 + (kept + states + 2 * (total - norms)) / 2**30, rel=0.001)


def test_qwen3_32b_with_the_smallest_recipe_needs_less_than_8_gib() -> None:
    assert estimate_memory(at_batch_4("smallest", model={"id": "Qwen/Qwen3-32B"}), H200).allocated.high < 8


def test_only_a_slow_link_adds_waiting_time() -> None:
    """By hand: of 0.3 s forward and 0.7 s back, copies of 0.2, 0.5 and 0.9 s a pass leave 0, 0.2 and 0.6 + 0.2 s;
    of states only 0.9 s back leaves 0.2 s."""
    for name, copied, late in ((WEIGHTS, 0.2, 0.0), (WEIGHTS, 0.5, 0.2), (WEIGHTS, 0.9, 0.8), (STATES, 0.9, 0.2)):
        work = StepWork(((1.0, {"products": 1.0, name: copied, "host": 0.0}),), 1, {})
        found = step(work, dict.fromkeys(("products", name, "host"), 1.0))
        assert found.seconds == pytest.approx(1 + late)
        assert found.parts[name] == pytest.approx(late)


def test_too_little_host_memory_is_reported_before_the_run(tmp_path: Path) -> None:
    gpu = {"name": "NVIDIA H200", "memory_gb": 140.4, "compute_capability": [9, 0]}
    roomy, small = ({"gpus": [gpu], "cpu": {"memory_gb": gib}} for gib in (64.0, 16.0))
    assert api.problem(at_batch_4("smallest-exact"), roomy, tmp_path) is None
    told = api.problem(at_batch_4("smallest-exact"), small, tmp_path)
    assert "keeps about 19.4 GiB there, and this machine has 16.0" in str(told)


def test_gpt_oss_120b_as_published_fits_an_h200() -> None:
    published = {"name": "qlora", "quant_type": "mxfp4"}
    one = spec(model={"id": "openai/gpt-oss-120b", "weights": "random"}, method=published, train={"batch_size": 1})
    assert estimate_memory(one, H200).verdict == "fits"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({
        "model": {"id": "Qwen/Qwen3-8B", "weights": "random"},
        "dataset": {"name": "synthetic", "samples": 64, "length": 2048},
    }))  # fmt: skip
    return path


def test_parts_add_up_to_the_peak_and_ranges_are_ordered() -> None:
    for gpu in (H200, 24.0):
        found = estimate_memory(spec(), gpu)
        assert sum(found.parts.values()) == pytest.approx(found.allocated.expected)
        assert found.phases[found.peak_phase] == pytest.approx(max(found.phases.values()))
        for band in (found.allocated, found.reserved, found.device):
            assert band.low <= band.expected <= band.high
        assert found.allocated.expected < found.reserved.expected < found.device.expected


def test_the_largest_batch_is_the_last_that_fits() -> None:
    largest = MemoryCache().largest_batch(spec(), H200)
    assert largest == 7  # the frontier of results/h200: 7 fits and 8 does not

    def verdict(batch: int) -> str:
        return estimate_memory(spec(train={"batch_size": batch}), H200).verdict

    assert verdict(7) == "fits"
    assert verdict(8) == "uncertain"
    assert verdict(16) == "does not fit"
    assert MemoryCache().largest_batch(spec(), 8.0) is None


def test_the_largest_batch_is_at_most_the_data_set() -> None:
    few = spec(dataset={"name": "synthetic", "samples": 3, "length": 128})
    assert MemoryCache().largest_batch(few, H200) == 3


@pytest.mark.parametrize("most", [0, 1, 300, 65_536])
@pytest.mark.parametrize(("per_row", "jump"), [(1e-4, 0.0), (0.3, 15.0), (9.0, 0.0)])
def test_largest_batch_is_the_last_one_with_spare_memory(most, per_row, jump):
    """Also if the memory grows in steps of eight rows, or much more at one size."""
    asked = []

    def spare(size):
        asked.append(size)
        return 40 - per_row * 8 * math.ceil(size / 8) - (jump if size > 50 else 0) - 1e-6 * size**2

    expected = max((size for size in range(1, min(most, 9000) + 1) if spare(size) >= 0), default=0)
    asked.clear()
    assert _largest_within(most, spare) == expected
    assert len(asked) <= 27
    assert all(1 <= size <= most for size in asked)


@pytest.mark.parametrize("seed", [0, 42])
def test_synthetic_lengths_are_known_before_they_are_drawn(seed: int) -> None:
    dataset = spec(dataset={"name": "synthetic", "samples": 500, "like": "japanese-alpaca", "seed": seed}).dataset
    lengths, _ = sample_lengths(dataset)
    assert lengths is not None
    assert lengths.tolist() == synthetic_lengths(dataset, 500)


def test_the_largest_batch_of_each_layout() -> None:
    """As results/h200/qwen3-8b-packing had them: 4 x 675 positions padded, 1,131 laid out, rows of 2,048 packed."""
    data = {"name": "synthetic", "samples": 160, "like": "japanese-alpaca"}

    def shape(**on: object) -> tuple[int, int, bool]:
        found = largest(spec(dataset=data, optimizations=on))
        return found.expected.rows, found.expected.length, found.padded

    assert shape() == (4, 675, True)
    assert shape(fixed_shape=True) == (4, 675, True)
    assert shape(padding_free=True) == (1, 1131, True)
    assert shape(packing=True) == (1, 8192, True)
    even = largest(spec())
    assert (even.expected.rows, even.expected.length, even.padded) == (4, 2048, False)


def test_unsloth_pads_gpt_oss_to_whole_blocks_of_attention() -> None:
    """As results/h100/founding-text had them: multiples of 128 tokens."""
    data = {"name": "synthetic", "samples": 1000, "like": "japanese-alpaca"}
    more = {"dataset": data, "method": {"name": "unsloth"}, "train": {"batch_size": 32, "max_steps": 12}}
    one = spec(model={"id": "openai/gpt-oss-20b", "weights": "random"}, **more)
    assert (largest(one).expected.rows, largest(one).expected.length) == (32, 768)
    (mean,) = batches_of(one, Lengths((100,) * 31 + (200,), 1.0, "a test"))
    assert (mean.positions, mean.real) == (32 * 256, 3300)


def test_real_data_is_bounded_by_max_length() -> None:
    known = largest(spec(dataset={"name": "japanese-alpaca", "samples": 1000, "max_length": 2048}))
    assert 500 < known.expected.length < 1000  # 742 in the synthetic set that is drawn like it
    assert known.most.length == 2048
    unknown = largest(spec(dataset={"name": "file", "path": "x.jsonl", "max_length": 512}))
    assert unknown.expected.length == unknown.most.length == 512


def test_accumulated_gradients_stay_during_the_forward_pass() -> None:
    one = estimate_memory(spec(method={"name": "full"}), 1000.0)
    several = estimate_memory(spec(method={"name": "full"}, train={"gradient_accumulation_steps": 4}), 1000.0)
    assert several.allocated.expected > one.allocated.expected + 10


@pytest.mark.parametrize(("name", "strategy"), [("RTX 5090", "zero3"), ("L40S", "zero2")])
def test_full_fine_tuning_of_8b_does_not_fit_four_small_gpus(name: str, strategy: str) -> None:
    """DeepSpeed's own estimator: 36.6 and 49.6 GiB of states, and the cards have 31.8 and 45."""
    small = next(gpu for gpu in gpus() if gpu.name == name)
    one = spec(method={"name": "full"}, train={"batch_size": 1}, optimizations={"gradient_checkpointing": True})
    assert estimate_memory(on_gpus(one, 4, strategy), small).verdict == "does not fit"


def test_an_unmeasured_strategy_has_the_widest_range() -> None:
    one, several = estimate_memory(spec(), H200), estimate_memory(on_gpus(spec(), 4, "zero2"), H200)
    assert several.allocated.high / several.allocated.expected == pytest.approx(1.15)
    assert one.allocated.high / one.allocated.expected == pytest.approx(1 + constants().allocated_range)


def test_an_unknown_model_says_how_to_give_its_shape(tmp_path: Path, file: Path) -> None:
    with pytest.raises(SpecError, match=r"set model\.path to a folder with its"):
        estimate(EstimateRequest(file, ["model.id=someone/new", "model.weights=pretrained"], gpu="H100 SXM5"))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(architectures()["Qwen/Qwen3-4B"]))
    sets = ["model.id=someone/new", "model.weights=pretrained"]
    local = estimate(EstimateRequest(file, [*sets, f"model.path={tmp_path}"], gpu="H100 SXM5"))
    known = estimate(EstimateRequest(file, ["model.id=Qwen/Qwen3-4B"], gpu="H100 SXM5"))
    assert json.loads(local.document)["gpus"] == json.loads(known.document)["gpus"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"gpu": "RTX 9999"}, "ftbench list gpus"), ({"gpu": "L4", "gpus": 0}, "greater than or equal to 1"),
     ({"gpu": "L4", "gpus": 2, "strategy": "none"}, "none is for one GPU"),
     ({"gpu": "L4", "strategy": "zero3"}, "zero3 needs several GPUs"),
     ({"gpu": "L4", "gpus": 2, "strategy": "magic"}, "'magic' is not allowed"),
     ({"gpu": "L4", "sets": ["train.batch_size=0"]}, "train.batch_size"),
     ({"gpu": "L4", "sets": ["dataset.length=-5"]}, "dataset.length")],
)  # fmt: skip
def test_invalid_options_are_errors(file: Path, change: dict[str, object], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        estimate(EstimateRequest(file, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["[]", "{", '{"model_type": "qwen3"}'])
def test_an_invalid_config_file_is_an_error(tmp_path: Path, file: Path, text: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    with pytest.raises(SpecError):
        estimate(EstimateRequest(file, [f"model.path={tmp_path}"], gpu="H100 SXM5"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"model_type": ["qwen3"]}, "no formula describes model_type"),
     ({"mlp_only_layers": 5}, "mlp_only_layers must be a list"),
     ({"layer_types": [["x"]] * 48}, "layer_types must be a list"), ({"num_hidden_layers": 10**9}, "at most 10,000"),
     ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0 and must be")],
)  # fmt: skip
def test_an_invalid_config_value_is_an_error(
    tmp_path: Path, file: Path, change: dict[str, object], sentence: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(architectures()["Qwen/Qwen3-30B-A3B"] | change))
    with pytest.raises(SpecError, match=sentence):
        estimate(EstimateRequest(file, [f"model.path={tmp_path}"], gpu="H100 SXM5"))


def test_check_sets_the_exit_code(file: Path) -> None:
    codes = [
        estimate(EstimateRequest(file, [f"train.batch_size={batch}"], gpu="H200 SXM")).code for batch in (7, 8, 16)
    ]
    assert codes == [0, 1, 2]
    assert estimate(EstimateRequest(file, ["train.batch_size=15"], gpu="all")).code == 0  # some card holds it


def test_a_gpu_without_fp8_does_not_fit_a_spec_with_fp8(file: Path) -> None:
    fp8 = ["recipe=fastest-fp8", "train.batch_size=1"]
    with pytest.raises(SpecError, match=r"no fp8 matrix products on A100 80GB: set optimizations\.fp8 to off"):
        estimate(EstimateRequest(file, fp8, gpu="A100 80GB"))
    answer = estimate(EstimateRequest(file, fp8, gpu="A100 80GB,H100 SXM5,H200 SXM"))
    assert [row["gpu"] for row in json.loads(answer.document)["gpus"]] == ["H100 SXM5", "H200 SXM"]
    assert "It fits 2 of 2 GPUs" in answer.text
    assert answer.text.endswith("without A100 80GB: no fp8 matrix products")


def test_gpus_are_found_by_common_names() -> None:
    found = gpus_named("H200 SXM,NVIDIA H200,h200 sxm,NVIDIA H100 80GB HBM3,L4")
    assert [gpu.name for gpu in found] == ["H200 SXM", "H100 SXM5", "L4"]


def test_a_run_that_does_not_fit_is_reported_before_it_starts(tmp_path: Path) -> None:
    gpu = {"name": "NVIDIA H200", "memory_gb": 140.4}
    assert api.problem(spec(train={"batch_size": 4}), {"gpus": [gpu]}, tmp_path) is None
    told = api.problem(spec(train={"batch_size": 16}), {"gpus": [gpu]}, tmp_path)
    assert told is not None
    assert "train.batch_size=7" in told
    assert api.problem(spec(train={"batch_size": 16}), {}, tmp_path) is None
    assert api.problem(spec(train={"batch_size": 16}, launch={"mock": "ok"}), {"gpus": [gpu]}, tmp_path) is None
    assert api.first_trial(spec(), gpu, tmp_path, 4096) in (7, 8)


def test_run_and_sweep_use_the_probes_of_their_folder(tmp_path: Path) -> None:
    gpu = {"name": "NVIDIA H200", "memory_gb": 140.4}
    batch_7 = spec(train={"batch_size": 7})
    assert api.problem(batch_7, {"gpus": [gpu]}, tmp_path) is None
    (tmp_path / "probe").mkdir()
    document = {"machine": {"gpus": [gpu]}, "device": {"kind": "cuda"}, "capacity": {"total_gb": 100.0}}
    (tmp_path / "probe" / "a.json").write_text(json.dumps(document))  # others hold the rest of the card
    told = str(api.problem(batch_7, {"gpus": [gpu]}, tmp_path))
    assert "100.0 for a process" in told
    assert "train.batch_size=5 would fit" in told
    assert api.first_trial(spec(), gpu, tmp_path, 4096) == 5
    memory = api.memory_on_machine(batch_7, gpu, tmp_path)
    assert memory is not None
    assert memory.usable == pytest.approx(100.0, abs=0.01)


def test_every_shipped_config_has_an_estimate() -> None:
    for path in sorted(Path("configs").glob("qwen3-*.yaml")) + sorted(Path("configs").glob("gpt-oss-*.yaml")):
        one = load(path)
        for gpu in gpus()[::6]:
            assert estimate_memory(one, gpu).allocated.expected > 0, path


@pytest.mark.parametrize("sets", [["measure.profile=on"],
                                  ["recipe=small"], ["recipe=smallest"],
                                  ["recipe=smallest-full"],
                                  ["recipe=fastest-fp8", "optimizations.fused_lora=on"],
                                  ["launch.mock=ok"], ["model.dtype=float32"],
                                  ["method.name=qlora", "optimizations.liger=on"]])  # fmt: skip
def test_specs_with_many_options_have_an_estimate_for_every_gpu(file: Path, sets: list[str]) -> None:
    assert "samples/h" in estimate(EstimateRequest(file, sets, gpu="H200 SXM")).text
    found = json.loads(estimate(EstimateRequest(file, sets, gpu="all")).document)["gpus"]
    assert [row["gpu"] for row in found] == [gpu.name for gpu in gpus() if gpu.fp8 or "fastest-fp8" not in sets[0]]


def test_an_estimate_of_all_gpus_needs_few_calls(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_PIPE", table._PAGE)  # the width that users have; drawing is half of the calls
    estimate(EstimateRequest(file, gpu="L4"))  # facts are read once
    assert calls_of(lambda: estimate_memory(spec(), H200)) < 50_000
    every = EstimateRequest(file, gpu="all", store=file.parent / "none")
    assert calls_of(lambda: estimate(every)) < 8_000 * len(gpus())


def test_the_capacity_of_an_h200_equals_its_driver() -> None:
    found = find_gpu("NVIDIA H200")
    assert found is not None
    assert capacity(found).total == pytest.approx(140.4014, abs=1e-3)  # machine.json of results/h200


def test_a_24_gb_card_has_less_for_a_process() -> None:
    """23.61 GiB is what torch names as the capacity of an RTX 4090 with a screen (pinokiofactory/flux-webui#11)."""
    small = next(gpu for gpu in gpus() if gpu.name == "RTX 4090")
    has = capacity(small)
    assert (round(has.total, 2), has.usable, has.margin) == (23.99, 23.61, 0.5)
    for gpu in gpus():
        assert 0.3 <= capacity(gpu).total - capacity(gpu).usable <= 0.7


@pytest.mark.parametrize(("larger", "smaller"), [
    ("RTX 3090", "A10G"), ("GB200", "B200"), ("V100 SXM2 16GB", "T4"),
])  # fmt: skip
def test_a_card_with_as_much_memory_has_as_much_for_a_process(larger: str, smaller: str) -> None:
    large, small = (next(gpu for gpu in gpus() if gpu.name == name) for name in (larger, smaller))
    assert large.memory_gb >= small.memory_gb
    assert capacity(large).usable >= capacity(small).usable


def test_an_rtx_3090_has_the_memory_of_its_driver() -> None:
    """24576 MiB by nvidia-smi and 23.56 GiB by torch (noonghunna/club-3090#58)."""
    has = capacity(next(gpu for gpu in gpus() if gpu.name == "RTX 3090"))
    assert (has.total, has.usable) == (24.0, 23.56)


@pytest.mark.parametrize(("high", "verdict"), [(23.6, "fits"), (23.8, "uncertain"), (24.5, "uncertain")])
def test_verdicts_compare_with_the_memory_of_a_process(high: float, verdict: str) -> None:
    """NVML's device memory includes 0.62 GiB of the driver: 23.6 are 22.98 for a process, and 0.5 is for a display."""
    small = next(gpu for gpu in gpus() if gpu.name == "RTX 4090")
    assert verdict_of(Band(21.5, 22.0, 22.5), Band(22.0, 23.0, high), capacity(small)) == verdict
    assert verdict_of(Band(23.3, 24.0, 24.5), Band(23.7, 24.0, 25.5), capacity(small)) == "does not fit"


def test_the_text_has_the_heaviest_and_the_largest_batch(file: Path) -> None:
    sets = ["dataset.samples=100", "dataset.length=512", "train.batch_size=4"]
    text = estimate(EstimateRequest(file, sets, gpu="H200 SXM")).text
    assert "largest batch in this data: 4 x 512 tokens" in text
    assert re.search(r"\nbatch +largest that fits: \d+", text)


def test_the_text_has_driver_memory_process_memory_and_margin(file: Path) -> None:
    text = estimate(EstimateRequest(file, ["model.id=Qwen/Qwen3-0.6B"], gpu="RTX 4090")).text
    assert "24.0 GiB in total (NVML), 23.6 for a process, less 0.500 for a display" in text
    (row,) = json.loads(estimate(EstimateRequest(file, gpu="RTX 4090")).document)["gpus"]
    assert (row["usable"], row["margin"]) == (23.61, 0.5)


def test_a_probe_replaces_the_usable_memory(file: Path, tmp_path: Path) -> None:
    capacity = {"total_gb": 23.4, "free_gb": 22.9, "driver_total_gb": 24.0, "driver_used_gb": 0.9, "context_gb": 0.4}
    document = {"machine": {"gpu": {"name": "NVIDIA GeForce RTX 4090"}}, "device": {"kind": "cuda"}}
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "a.json").write_text(json.dumps({**document, "capacity": capacity}))
    (row,) = json.loads(estimate(EstimateRequest(file, gpu="RTX 4090", store=tmp_path)).document)["gpus"]
    assert (row["total"], row["usable"], row["margin"]) == (24.0, pytest.approx(23.4), 0.5)
    table = estimate(EstimateRequest(file, gpu="RTX 4090,H200 SXM", store=tmp_path)).text
    assert "22.9" in table
    assert "less 0.500 GiB for a display" in " ".join(table.split())


@pytest.mark.parametrize(("method", "count"), [({"name": "lora"}, 6_684_672), ({"name": "full"}, 30_532_122_624),
                                               ({"name": "lora", "experts": True}, 321_257_472)])  # fmt: skip
def test_memory_and_time_train_the_same_parameters_of_a_mixture_of_experts(method: object, count: int) -> None:
    """Adapters of rank 8: on queries, keys, values and output, or also on 128 experts of 48 layers."""
    one = spec(model={"id": "Qwen/Qwen3-30B-A3B", "weights": "random"}, method=method)
    shape = trainable_shape(one)
    weight = 2 if one.method.name == "full" else 4
    parts = estimate_memory(one, H200).parts | estimate_memory(one, 1000.0).parts
    assert shape.trained == count
    fitted = constants().allocated_factor
    assert parts["optimizer state"] == pytest.approx(fitted * 2 * weight * count / 2**30, rel=1e-6)


def test_both_estimates_train_what_a_committed_run_trained() -> None:
    for directory in Path("results/h200/grid").glob("qwen3-30b-*"):
        values = json.loads((directory / "spec.json").read_text())
        run = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
        live = json.loads((directory / "applied.json").read_text())["parameters"]
        assert trainable_shape(run).trained == live["trainable"]
        assert trainable_shape(run).model.total + live["trainable"] == live["total"]


def test_the_range_of_unsloth_packing_ends_at_most_half_a_percent_before_its_run() -> None:
    """Ranges contain nine of ten runs. The reserved memory of this run is 0.2 % above its range."""
    (run,) = find_runs(Path("results/h200/headline-first/short-equal/qwen3-8b-unsloth-b1-7884f9c165af-r1"))
    values, summary = json.loads(run.spec_json.read_text()), json.loads(run.summary.read_text())
    packed = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
    gpu = find_gpu(summary["gpu"])
    assert gpu is not None
    memory = estimate_memory(packed, gpu)
    for tier in ("allocated", "reserved", "device"):
        band, peak = getattr(memory, tier), summary["memory_gb"][f"{tier}_peak"]
        assert band.low <= peak <= band.high * (1.005 if tier == "reserved" else 1), tier
    time = estimate_duration(packed, gpu)
    assert time.step_s.low <= summary["step_time_s"]["mean"] <= time.step_s.high


@pytest.mark.parametrize(
    ("sets", "nearest"),
    [
        (["optimizations.packing=on"], "--set optimizations.packing=off"),
        (["method.load_in_4bit=off", "method.cuda_graphs=on"], "--set method.cuda_graphs=off"),
    ],
)
def test_unmeasured_unsloth_settings_name_an_estimated_one(file: Path, sets: list[str], nearest: str) -> None:
    request = EstimateRequest(file, ["method=unsloth", *sets], gpu="H200 SXM")
    with pytest.raises(SpecError, match=f"w(as|ere) never measured: estimate with {nearest}, or train"):
        estimate(request)
    assert estimate(replace(request, sets=[*request.sets, nearest.removeprefix("--set ")])).document


def test_the_first_trial_of_concatenated_samples_is_expected_to_fit(tmp_path):
    """A search trains the longest samples first, so its batches are longer than the mean batch."""
    chosen = load(
        Path("Qwen/Qwen3-0.6B"), ["method=unsloth", "dataset={name: synthetic, samples: 2000, mean_length: 600}"]
    )
    batch = api.first_trial(chosen, {"name": "NVIDIA GeForce RTX 4090", "memory_gb": 23.99}, tmp_path, 65_536)
    assert batch is not None
    tried = chosen.model_copy(update={"dataset": chosen.dataset.model_copy(update={"longest_first": True})})
    memory = estimate_memory(with_batch(tried, batch), next(each for each in gpus() if each.name == "RTX 4090"))
    assert memory.verdict != "does not fit"
