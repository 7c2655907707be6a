"""A simulated step holds what a real one holds: byte for byte against live objects, and against runs of an H200."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

import warm
from conftest import TINY, spec_of
from ftbench.core.hardware import find_gpu
from ftbench.core.units import GIB
from ftbench.errors import SpecError
from ftbench.estimate import simulation
from ftbench.estimate.memory.estimate import estimate_memory
from ftbench.spec.experiment import Experiment
from ftbench.spec.load import load
from ftbench.spec.refusals import check_simulated
from ftbench.store.rundir import RunDir, first_gpu, read_json
from ftbench.worker import methods
from ftbench.worker.measure.hf_adapter import HfRecording
from ftbench.worker.model.loading import source_of
from ftbench.worker.simulate.account import account, rounded
from ftbench.worker.simulate.run import Watch, heaviest, shortened, simulate
from ftbench.worker.simulate.tracker import ACCUMULATE, Storage, Tracker
from ftbench.worker.train import assembled, prepared

H200 = Path(__file__).parents[2] / "results" / "h200"


HALF = {"model": {"dtype": "bfloat16"}, "train": {"precision": "bf16"}}
FIXED = {"dataset": {"length": 64, "mean_length": None, "samples": 12}}
PICTURES = {"name": "images", "image_size": [90, 60], "max_length": 256}
CASES: dict[str, dict[str, Any]] = {
    "full": {"method": {"name": "full"}},
    "lora": {},
    "moe": {"model": {"id": "tiny/qwen3-moe", "dtype": "bfloat16"}, "train": {"precision": "bf16"}},
    "eager": {"optimizations": {"attention": "eager"}, **FIXED, **HALF},
    "sdpa": {"optimizations": {"attention": "sdpa"}, **FIXED, **HALF},
    "selective": {"optimizations": {"gradient_checkpointing": "selective"}, **FIXED, **HALF},
    "checkpointing": {"optimizations": {"gradient_checkpointing": True}, **FIXED, **HALF},
    "accumulation": {**FIXED, **HALF, "train": {"precision": "bf16", "gradient_accumulation_steps": 4}},
    **{
        family: {
            "model": {"id": f"tiny/{family}"},
            "dataset": PICTURES,
            "method": {"vision": "lora", "projector": "full"},
        }
        for family in ("llava-next", "qwen2.5-vl", "qwen3-vl")
    },
    "qlora": {"method": {"name": "qlora"}},  # the last: bitsandbytes keeps its tables, fake ones too, for the process
}
OLMO = {
    "model_type": "olmo", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every case simulated, in a process of its own, as a simulation always is."""
    folder = tmp_path_factory.mktemp("simulated")
    config = folder / "config.json"
    config.write_text(json.dumps(OLMO))
    cases = CASES | {"olmo": {"model": {"id": "my/olmo", "path": str(config)}}}
    calls = [(spec_of(**changes), RunDir(folder), (9, 0), 141 * 10**9) for changes in cases.values()]
    return dict(zip(cases, warm.each(simulate, calls), strict=True))


def live_bytes(tmp_path: Path, **changes: Any) -> dict[str, int]:
    """What the objects of a real run on this CPU hold, in blocks of the GPU's allocator."""
    spec = spec_of(**changes)
    source = source_of(spec.model)
    tokenizer, data = prepared(spec, source)
    short, data = shortened(spec, data, heaviest(spec, data))
    model = methods.load(spec.method.name).load(short, source)
    watch = Watch(Tracker())
    loop = assembled(short, RunDir(tmp_path / "real"), model, tokenizer, data)
    HfRecording(watch).attach(loop)
    loop.add_callback(watch)
    watch.model = loop.model
    loop.train()
    storages: dict[str, dict[int, int]] = {"weights": {}, "adapters": {}, "optimizer": {}}

    def add(part: str, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        storages[part][storage.data_ptr()] = rounded(storage.nbytes())

    for tensor in (*loop.model.parameters(), *loop.model.buffers()):
        trained = tensor.requires_grad and spec.method.name != "full"
        add("adapters" if trained else "weights", tensor)
        if (state := getattr(tensor, "quant_state", None)) is not None:
            for constant in (state.absmax, state.offset, state.code, state.state2.absmax, state.state2.code):
                add("weights", constant)
    for values in loop.optimizer.state.values():
        for value in values.values():
            if value.numel() > 1:  # the count of steps stays on the host
                add("optimizer", value)
    return {part: sum(sizes.values()) for part, sizes in storages.items()}


@pytest.mark.parametrize("method", ["full", "lora", "llava-next", "qwen2.5-vl", "qwen3-vl", "qlora"])
def test_weights_adapters_and_optimizer_are_byte_for_byte_those_of_a_real_run(
    tmp_path: Path, cache: Path, found: dict[str, Any], method: str
) -> None:
    parts, live = found[method]["peak"]["parts_gb"], live_bytes(tmp_path, **CASES[method])
    assert {part: round(parts[part] * GIB) for part in live} == live


@pytest.mark.parametrize("case", CASES)
def test_parts_add_up_to_the_peak_and_the_second_step_holds_the_optimizers_state(
    found: dict[str, Any], case: str
) -> None:
    peak, (first, second) = found[case]["peak"], found[case]["steps"]
    assert sum(peak["parts_gb"].values()) == pytest.approx(peak["gb"], abs=1e-9)
    assert peak["gb"] == max(found[case]["phases"].values()) == second["peak_gb"] > first["peak_gb"]


def test_attention_without_a_mask_never_holds_the_square_of_the_length_and_eager_does(found: dict[str, Any]) -> None:
    squares = {
        name: sum(list(group["shape"][2:]) == [64, 64] for group in found[name]["peak"]["tensors"])
        for name in ("sdpa", "eager")
    }
    assert squares["sdpa"] == 0 < squares["eager"]


def test_checkpointing_keeps_fewer_activations_and_selective_lies_between(found: dict[str, Any]) -> None:
    plain, selective, every = (found[name]["phases"]["forward"] for name in ("sdpa", "selective", "checkpointing"))
    assert plain > selective > every


def test_gradients_wait_while_the_next_micro_batch_runs(found: dict[str, Any]) -> None:
    adapters = found["accumulation"]["peak"]["parts_gb"]["adapters"]
    assert found["accumulation"]["peak"]["parts_gb"]["gradients"] == pytest.approx(adapters)
    assert found["accumulation"]["phases"]["forward"] > found["sdpa"]["phases"]["forward"]


def test_a_mixture_of_experts_is_simulated(found: dict[str, Any]) -> None:
    assert any("experts" in group["module"] for group in found["moe"]["peak"]["tensors"])


def test_the_heaviest_batch_is_among_those_that_the_run_will_see(cache: Path) -> None:
    spec = spec_of(train={"batch_size": 2, "max_steps": 2})
    _, data = prepared(spec, source_of(spec.model))
    lengths = [len(row[0].ids) for row in data.train[:4]]
    chosen = [len(row[0].ids) for row in heaviest(spec, data)]
    assert max(chosen) == max(lengths)
    assert len(chosen) == 2


def test_a_sum_of_gradients_takes_the_place_of_a_term_that_nobody_else_holds() -> None:
    tracker = Tracker()
    tracker.enter("backward")
    tracker.storages = [
        Storage(1024, 0, "backward", "", "mm", (), "", freed=2),
        Storage(1024, 1, "backward", "", ACCUMULATE, (), "", in_place=True),
    ]
    tracker.events, tracker.steps = 3, [0]
    assert account(tracker, "model", 7)["peak"]["gb"] == 1024 / GIB


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"name": "unsloth"}},
        {"optimizations": {"liger": True}},
        {"optimizations": {"compile": True}},
        {"optimizations": {"fp8": "rowwise"}},
        {"optimizations": {"gradient_checkpointing": "offload"}},
        {"optimizations": {"activation_offload": True}},
        {"optimizations": {"attention": "flex_attention"}},
        {"optimizations": {"attention": "flash_attention_2", "packing": True}},
        {"method": {"name": "qlora", "quant_type": "mxfp4"}, "model": {"id": "tiny/gpt-oss", "dtype": "auto"}},
        {"train": {"optimizer": "paged_adamw_8bit"}},
    ],
    ids=str,
)
def test_what_a_simulation_would_get_wrong_is_refused_with_a_way_out(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="or estimate without --simulate, which knows llama, ") as refused:
        check_simulated(spec_of(**changes))
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps(TINY | {section: TINY.get(section, {}) | keys for section, keys in changes.items()}))
    (advice,) = re.findall(r"--set (\S+),", str(refused.value))
    check_simulated(load(file, [advice]))


def test_a_family_that_no_formula_knows_is_simulated_as_the_estimate_says(
    found: dict[str, Any], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(OLMO))
    spec = spec_of(model={"id": "my/olmo", "path": str(config)})
    with pytest.raises(SpecError, match="--simulate` runs what transformers makes of it"):
        estimate_memory(spec, gpu("NVIDIA H200"))
    known = spec_of(model={"id": "tiny/qwen3"})
    with pytest.raises(SpecError, match="instead of --config"):
        estimate_memory(known, gpu("NVIDIA H200"), config=json.loads(config.read_text()))
    assert found["olmo"]["peak"]["gb"] > 0


def test_estimate_and_simulation_take_the_same_workspaces(found: dict[str, Any]) -> None:
    counted = estimate_memory(spec_of(), gpu("NVIDIA H200")).parts["workspace"]
    assert found["lora"]["peak"]["parts_gb"]["workspace"] == pytest.approx(counted, abs=1e-4)


def test_what_the_child_says_reaches_the_user_as_a_sentence(tmp_path: Path) -> None:
    spec = spec_of(model={"id": "tiny/llama", "weights": "pretrained", "path": str(tmp_path)})
    with pytest.raises(SpecError, match="model_type"):
        warm.returned(simulation.simulate, spec, gpu("NVIDIA H200"))


def gpu(name: str) -> Any:
    found = find_gpu(name)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("run", ["qwen3-8b-frontier/qwen3-8b-full-b2-5ffb01a1f7dd-r1"])
def test_an_8b_model_from_its_shape_alone_peaks_where_the_h200_did(run: str) -> None:
    directory = RunDir(H200 / run)
    values = json.loads(directory.spec_json.read_text())
    spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
    found = warm.returned(simulation.simulate, spec, gpu(first_gpu(read_json(directory.machine))["name"]))
    with directory.steps.open() as file:
        first, second = [float(row["peak_memory_gb"]) for row in csv.DictReader(file)][:2]
    assert found.steps_gb == pytest.approx((first, second), rel=0.002)
    assert found.peak_gb == pytest.approx(read_json(directory.summary)["memory_gb"]["allocated_peak"], rel=0.002)
