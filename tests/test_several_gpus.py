"""One run in several processes over gloo.

With SGD without clipping they learn the same as one process at the same global batch. If one rank ends, all end, and
the state names it.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import torch

from commands import ENDLESS, Command, write_spec
from ftbench.errors import SpecError
from ftbench.estimate.workload.model import shape_of
from ftbench.estimate.workload.sharding import rank_model, sharding_of
from ftbench.families import FAMILIES
from ftbench.launch import progress, trl
from ftbench.spec import strategies
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import WITH_IMAGES
from ftbench.store import rundir
from ftbench.store.ranks import read_ranks
from ftbench.store.steps import read_steps
from ftbench.worker import trainer
from ftbench.worker.parallel import rendezvous, tp
from waiting import free_ports

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("cache")]
SGD = {"optimizer": "sgd", "max_grad_norm": 1e9, "learning_rate": 0.02, "lr_scheduler": "constant"}
# 21 samples of different lengths: in the last step of an epoch one rank has more samples than the other.
DATA = {"name": "synthetic", "samples": 21, "mean_length": 20, "max_length": 64, "eval_samples": 3}


def run(folder: Path, gpus: int, strategy: str, before: Any = None, **parts: Any) -> Command:
    """Run a spec on this number of ranks with the same global batch."""
    launch = {"gpus": gpus, "strategy": strategy if gpus > 1 else "none"}
    shares = {"tp": 1, "ep": 1, "cp": 1, "tp+fsdp": max(1, gpus // 2)}.get(strategy, gpus)
    train = {"batch_size": 2, "gradient_accumulation_steps": 4 // shares, "epochs": 1, **SGD, **parts.get("train", {})}
    folder.mkdir(parents=True, exist_ok=True)
    spec = write_spec(folder, **{"dataset": DATA, **parts, "train": train, "launch": launch})
    with Command(spec, folder / "out", before=before) as command:
        command.finish()
    assert command.code == 0, command.stderr
    return command


def learned(command: Command) -> list[tuple[Any, ...]]:
    return [(row.phase, row.step, row.samples, row.real_tokens, row.label_tokens) for row in command.steps()]


def figures(command: Command, *names: str) -> list[float]:
    values = (getattr(row, name) for row in command.steps() for name in names or ("loss", "grad_norm"))
    return [value for value in values if value is not None]


def dataset_of(command: Command) -> dict[str, Any]:
    return rundir.read_json(command.run.applied)["dataset"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return a function that trains a spec in one process and in several ranks, each once per module."""
    runs: dict[str, Command] = {}

    def trained(strategy: str, gpus: int = 2, **parts: Any) -> tuple[Command, Command]:
        folder, key = tmp_path_factory.mktemp("ranks"), json.dumps([strategy, gpus, parts])
        alone = json.dumps(parts)
        if alone not in runs:
            runs[alone] = run(folder / "one", 1, strategy, **parts)
        if key not in runs:
            runs[key] = run(folder / "several", gpus, strategy, partial(check_gradients, folder / "lacks"), **parts)
        return runs[alone], runs[key]

    return trained


KEPT = {"measure": {"save_adapter": True}}
LORA = {"method": {"name": "lora"}, **KEPT}
FULL, QLORA = {"method": {"name": "full"}}, {"method": {"name": "qlora"}}
HALF = {"train": {"precision": "bf16"}}
# Each step has a row for only one of two ranks.
ONE_ROW = {"optimizations": {"packing": True}, "dataset": DATA | {"samples": 3}, "train": {"epochs": 4}}
AGAIN = {"optimizations": {"gradient_checkpointing": True}}
EXPERTS = {"model": {"id": "tiny/qwen3-moe", "weights": "random"}}
# An untied head: the chunked loss uses its weights outside of its forward pass.
HEAD = {"model": {"id": "tiny/llama", "weights": "random"}, "optimizations": {"chunked_loss": True}}
# Images of different sizes. With sharded weights each rank needs an image in each step.
PICTURES = {"name": "images", "samples": 24, "image_size": [56, 40], "image_sizes": "photographs", "mean_length": 12,
            "max_length": 256, "eval_samples": 4}  # fmt: skip
LLAVA, QWEN25, QWEN3 = (
    {"model": {"id": f"tiny/{name}", "weights": "random"}, "dataset": PICTURES}
    for name in ("llava-next", "qwen2.5-vl", "qwen3-vl")
)
# The fast recipe on a CPU. `test_sharded_layers_are_compiled_without_their_hooks` compiles it.
FAST = HEAD | {
    "dataset": DATA | {"samples": 60, "max_length": 32},
    "optimizations": {"gradient_checkpointing": "selective", "packing": True, "fixed_shape": True, "chunked_loss": True,
                      "fused_lora": True},
}  # fmt: skip
# Few label tokens, so the last layer does not compute the others.
FEW = FAST | KEPT | {"dataset": FAST["dataset"] | {"structure": "tasks"}}
NO_DEEPSPEED = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")
exhaustive = partial(pytest.param, marks=pytest.mark.exhaustive)
IMAGES = QWEN3 | {"dataset": PICTURES | {"samples": 26, "eval_samples": 2}}
PROVEN = [
    *[("ddp", LORA), ("ddp", QLORA), ("ddp", ONE_ROW), ("fsdp", LORA), ("fsdp", FULL), ("fsdp", FEW), ("fsdp", LLAVA)],
    *[("tp", FULL), ("ep", EXPERTS | LORA), ("cp", LORA)],
    *[pytest.param(f"zero{stage}", parts, marks=NO_DEEPSPEED) for stage, parts in ((1, FULL), (2, LORA), (3, LORA))],
    *[
        exhaustive(strategy, parts)
        for strategy, parts in (
            *[("ddp", FEW), ("fsdp", FAST)],
            *[("ddp", FULL), ("fsdp", HALF), ("fsdp", LORA | AGAIN), ("fsdp", HEAD | FULL), ("cp", LORA | AGAIN)],
            *[("cp", FULL), ("tp", EXPERTS), ("tp", LORA), ("tp", FULL | KEPT), ("ep", EXPERTS | FULL | KEPT)],
            *[("ddp", IMAGES), ("ddp", LLAVA), ("ddp", QWEN25), ("ddp", LLAVA | FULL), ("fsdp", QWEN25)],
            *[("fsdp", QWEN3), ("fsdp", QWEN3 | FULL), ("fsdp", QWEN25 | FULL), ("fsdp", LLAVA | FULL)],
            *[("tp", QWEN25 | FULL), ("tp", LLAVA)],
        )
    ],
    *[
        pytest.param(f"zero{stage}", parts, marks=[NO_DEEPSPEED, pytest.mark.exhaustive])
        for stage, parts in ((1, QLORA), (2, QLORA), (3, QLORA), (3, LLAVA), (3, QWEN25), (3, QWEN3))
    ],
]


def assert_same_adapters(one: Command, several: Command) -> None:
    """Check that both saved adapters are equal."""
    from safetensors.torch import load_file

    saved, others = (load_file(*each.run.adapter.glob("*.safetensors")) for each in (one, several))
    assert len(saved) > 0
    assert saved.keys() == others.keys()
    assert all(others[name].allclose(saved[name], rtol=1e-3, atol=1e-6) for name in saved)


@pytest.mark.parametrize(("strategy", "parts"), PROVEN, ids=str)
def test_two_ranks_learn_the_same_as_one_process(pair, strategy, parts):
    """Includes accumulation, different lengths, an incomplete last step, and evaluation."""
    one, two = pair(strategy, **parts)
    assert learned(two) == learned(one)
    for name in ("loss", "grad_norm"):
        # With 16-bit adapters, one process computes the norm in 16 bits.
        rel = 2**-8 if name == "grad_norm" and parts in (QLORA, HALF) else 2e-6 if parts in (FAST, FEW) else 1e-4
        assert figures(two, name) == pytest.approx(figures(one, name), rel=rel)
    assert len({row.loss for row in one.steps()}) > 3
    assert dataset_of(two)["order_hash"] == dataset_of(one)["order_hash"]
    if "measure" in parts:
        assert_same_adapters(one, two)


def test_another_method_sees_the_same_tokens_in_the_same_order(pair):
    (lora, _), (full, _) = pair("ddp", **LORA), pair("fsdp", **FULL)
    for name in ("hash", "order_hash"):
        assert lora.summary()["dataset"][name] == full.summary()["dataset"][name]
    parameters = [each.summary()["parameters"] for each in (lora, full)]
    assert parameters[0]["trainable"] < parameters[0]["total"]
    assert parameters[1]["trainable"] == parameters[1]["total"]


def test_tp_is_refused_for_families_without_a_plan():
    """If this fails, transformers supports tp for these families, and the check can be removed."""
    from transformers import CONFIG_MAPPING

    plans = {name: CONFIG_MAPPING[name]().get_text_config().base_model_tp_plan for name in (*FAMILIES, *WITH_IMAGES)}
    assert {name for name, plan in plans.items() if not plan} == {*strategies._WITHOUT_PLAN}
    with pytest.raises(ValueError, match="not have a tp sharding plan for tiny/qwen3-vl: use fsdp"):
        Experiment.model_validate({"name": "a", **QWEN3, "launch": {"gpus": 2, "strategy": "tp"}})
    config, spec = CONFIG_MAPPING["qwen3_vl"](), SimpleNamespace(model=SimpleNamespace(id="a/b"))
    with pytest.raises(SpecError, match="not have a tp sharding plan for a/b: use fsdp"):
        tp.require_plan(spec, config)


SHOWN, TEXT = [SimpleNamespace(pictures=("a",))], [SimpleNamespace(pictures=())]


@pytest.mark.parametrize(("train", "evaluation", "most", "key"), [
    ([SHOWN] * 10, [], None, "samples"),
    ([SHOWN] * 2, [], None, "samples"),  # not even one step
    ([SHOWN] * 10, [], 3, "samples"),
    ([SHOWN] * 10, [], 2, None),
    ([SHOWN] * 11, [], None, None),  # both GPUs have images in the last batch
    ([SHOWN] * 8, [SHOWN] * 2, None, "eval_samples"),
    ([SHOWN] * 8, [SHOWN] * 3, None, None),
    ([SHOWN, SHOWN, TEXT, TEXT], [], None, "samples"),
    ([SHOWN, TEXT, TEXT, SHOWN], [], None, None),
])  # fmt: skip
def test_rank_without_an_image_is_refused_with_sharded_weights(train, evaluation, most, key):
    values = {"name": "a", **LLAVA, "train": {"batch_size": 2, "max_steps": most}}
    spec = Experiment.model_validate(values | {"launch": {"gpus": 2, "strategy": "fsdp"}})
    message = rf"a batch of dataset\.{key} has no image, .* multiple of 4, .* use ddp$"
    with pytest.raises(SpecError, match=message) if key else nullcontext():
        trainer._check_pictures(spec, SimpleNamespace(train=train, evaluation=evaluation), 4)


@pytest.mark.parametrize("recomputed", ["selective", exhaustive(True)])
def test_recomputed_layers_have_the_same_dropout(tmp_path, recomputed):
    parts = {"method": {"name": "lora", "dropout": 0.5}, "train": {"max_steps": 2}}
    plain, again = (
        figures(run(tmp_path / str(way), 2, "fsdp", **parts, optimizations={"gradient_checkpointing": way}))
        for way in (False, recomputed)
    )
    assert again == pytest.approx(plain, rel=1e-4)


def check_gradients(place: Path) -> None:
    """Create a file if a weight of a rank lacks its shard of the gradient after a micro-batch."""
    from transformers import Trainer

    training_step = Trainer.training_step

    def train_and_check(trainer: Trainer, *arguments: Any, **others: Any) -> Any:
        loss = training_step(trainer, *arguments, **others)
        if any(each.grad is None for each in trainer.model.parameters()):
            place.touch()
        return loss

    Trainer.training_step = train_and_check


def test_gradients_are_sharded_after_each_micro_batch(pair):
    """Otherwise, each rank keeps the complete gradients until the last micro-batch of a step."""
    _, two = pair("fsdp", **FULL)
    assert not (two.out.parents[1] / "lacks").exists()


def test_each_rank_trains_its_share_in_order(pair):
    one, two = pair("ddp", **LORA)
    ranks, warnings = read_ranks(two.run)
    assert warnings == []
    assert [{row.rank for row in rows} for rows in ranks] == [{0}, {1}]
    assert sum(row.real_tokens for rows in ranks for row in rows if row.phase == "train") == sum(
        row.real_tokens for row in one.steps() if row.phase == "train"
    )
    assert all(rows != ranks[0] for rows in ranks[1:])


def test_summary_has_the_ranks(pair):
    _, two = pair("ddp", **LORA)
    assert "-lora-ddp-2gpus-b2-" in two.run.run_id
    assert two.summary()["ranks"]["count"] == 2
    assert all((two.run.path / f"{name}.rank1.json").exists() for name in ("state", "applied", "phases"))


def test_fsdp_shards_all_parameters(pair):
    _, two = pair("fsdp", **FULL)
    parallel = rundir.read_json(two.run.applied)["parallel"]
    assert (parallel["strategy"], parallel["ranks"], parallel["global_batch"]) == ("fsdp", 2, 8)
    assert parallel["sharded"] == 2 * 11 + 2  # two layers, the norm, and the embedding with a tied head
    assert parallel["elements_of_rank"] * 2 == parallel["elements"] == two.summary()["parameters"]["total"]


@pytest.mark.parametrize(("strategy", "gpus"), [("tp", 2), pytest.param("tp+fsdp", 4, marks=pytest.mark.exhaustive)])
def test_elements_of_a_rank_equal_the_estimate(pair, strategy, gpus):
    _, several = pair(strategy, gpus, **FULL)
    values = rundir.read_json(several.run.spec_json)
    spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields})
    division = sharding_of(spec.launch)
    expected = rank_model(shape_of(spec.model), division).total / division.holders
    assert rundir.read_json(several.run.applied)["parallel"]["elements_of_rank"] == expected


def test_cp_splits_each_sequence(pair):
    """Rows are padded to two equal parts per rank, and all layers exchange keys and values."""
    one, two = pair("cp", **LORA)
    parallel = rundir.read_json(two.run.applied)["parallel"]
    assert (parallel["shares"], parallel["global_batch"]) == (1, 8)
    assert parallel["rounds"] == 2 * 4  # layers and batches
    assert parallel["elements_of_rank"] * 2 == parallel["elements"]
    assert all(row.padded_tokens % 4 == 0 for row in two.steps())
    assert any(row.padded_tokens % 4 for row in one.steps())


@NO_DEEPSPEED
def test_zero_shards_the_states_of_its_stage(pair):
    """Each rank has half of the optimizer states, and in stage 3 half of the weights."""
    for strategy, parts, kept in (("zero1", FULL, 1), ("zero2", LORA, 1), ("zero3", LORA, 2)):
        _, two = pair(strategy, **parts)
        parallel = rundir.read_json(two.run.applied)["parallel"]
        assert parallel["optimizer_elements_of_rank"] * 2 == parallel["trained_elements"]
        assert parallel["elements_of_rank"] * kept == parallel["elements"] == two.summary()["parameters"]["total"]
    assert parallel["sharded"] == 52


@NO_DEEPSPEED
@pytest.mark.parametrize(("strategy", "offload"), [("zero2", "optimizer"), ("zero3", "params")])
def test_offloaded_states_are_trained(tmp_path, pair, strategy, offload):
    one, _ = pair("ddp", **LORA)
    launch = {"gpus": 2, "strategy": strategy, "offload": offload}
    train = rundir.read_json(one.run.spec_json)["train"] | {"gradient_accumulation_steps": 2}
    with Command(write_spec(tmp_path, dataset=DATA, **LORA, train=train, launch=launch), tmp_path / "out") as command:
        assert command.finish().code == 0, command.stderr
    assert learned(command) == learned(one)
    assert figures(command) == pytest.approx(figures(one), rel=1e-4)


FOUR = [
    ("tp+fsdp", LORA),
    ("ddp", LORA),
    ("tp+fsdp", FULL),
    ("tp+fsdp", EXPERTS),
    ("tp+fsdp", FULL | HALF | {"model": {"id": "tiny/qwen3", "weights": "random", "dtype": "bfloat16"}}),
    ("fsdp", FULL),
    ("ep", EXPERTS | FULL),
    ("tp+fsdp", LLAVA | FULL),
    ("tp+fsdp", LORA | AGAIN),
    ("tp+fsdp", FULL | AGAIN | KEPT),
]
FOUR = FOUR[:1] + [pytest.param(*case, marks=pytest.mark.exhaustive) for case in FOUR[1:]]


@pytest.mark.parametrize(("strategy", "parts"), FOUR, ids=str)
def test_four_ranks_learn_the_same_as_one_process(pair, strategy, parts):
    """The last step has samples for three of the ranks."""
    one, four = pair(strategy, 4, **parts)
    assert learned(four) == learned(one)
    assert figures(four, "loss") == pytest.approx(figures(one, "loss"), rel=1e-4)
    assert figures(four, "grad_norm") == pytest.approx(
        figures(one, "grad_norm"), rel=2**-8 if "train" in parts else 1e-4
    )
    assert four.summary()["ranks"]["count"] == 4
    if "measure" in parts:
        assert_same_adapters(one, four)


@pytest.mark.exhaustive
def test_tp_with_fsdp_saves_weights_in_32_bits(tmp_path):
    """With 16-bit products, FSDP gathers 16-bit copies of the weights, and an evaluation leaves some of them gathered.
    The head is not tied."""
    from safetensors.torch import load_file

    model = {"model": {"id": "tiny/llama", "weights": "random"}}
    saved = load_file(*run(tmp_path, 4, "tp+fsdp", **FULL | HALF | KEPT | model).run.adapter.glob("*.safetensors"))
    assert {each.dtype for each in saved.values()} == {torch.float32}


def test_tp_with_fsdp_shards_twice(pair):
    one, four = pair("tp+fsdp", 4, **LORA)
    parallel = rundir.read_json(four.run.applied)["parallel"]
    assert (parallel["shares"], parallel["global_batch"], parallel["sharded"]) == (2, 8, 2 * (11 + 14) + 2)
    assert parallel["elements"] / 4 <= parallel["elements_of_rank"] < 0.26 * parallel["elements"]
    rows = [[(row.step, row.real_tokens) for row in rows if row.phase == "train"] for rows in read_ranks(four.run)[0]]
    assert rows[0] == rows[1] != rows[2] == rows[3]
    assert_same_adapters(one, four)


# --- limits of libraries ---------------------------------------------------------------------------------------------


def train(optimizer: str) -> dict[str, Any]:
    return {"train": {"batch_size": 2, "max_steps": 1, "optimizer": optimizer}}


def lifted() -> None:
    """Start a run although its strategy refuses it."""
    strategies.incompatibilities = lambda spec: []
    trl.problems = lambda spec, capability: []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launch", "parts", "reason"),
    [
        ({"strategy": "fsdp"}, QLORA, "q_proj.base_layer.weight and 13 more"),
        ({"strategy": "tp"}, QLORA, "'DTensor' object has no attribute 'compress_statistics'"),
        ({"strategy": "fsdp"}, FULL | train("adamw_bnb_8bit"), "optimizer_update_32bit.default does not have a shard"),
        ({"strategy": "tp"}, FULL | train("adamw_torch_fused"), "AdamW is not fused"),
        ({"strategy": "ep"}, EXPERTS | {"method": {"name": "lora", "experts": True}},
         "aten.baddbmm.default got mixed torch"),
        ({"strategy": "fsdp", "offload": "params"}, LORA, "Cannot access accelerator device when none is available"),
        ({"strategy": "cp"}, LORA | {"optimizations": {"chunked_loss": True}}, "out of bounds"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_setting_fails_in_the_library(tmp_path, launch, parts, reason):
    """If this fails, the library supports it, and the check can be removed."""
    parts = {"dataset": DATA, "train": {"batch_size": 2, "max_steps": 1}, **parts, "launch": {"gpus": 2} | launch}
    with Command(write_spec(tmp_path, **parts), tmp_path / "out", before=lifted) as command:
        command.finish()
    assert reason in command.state()["reason"], command.state()


# --- failures --------------------------------------------------------------------------------------------------------

ON_TWO = {**ENDLESS, "launch": {"gpus": 2}}


def ranks_of(command: Command) -> list[psutil.Process]:
    """Return the worker processes in the order of their ranks."""
    return sorted(command.children(), key=lambda each: (each.create_time(), each.pid))[-2:]


def wait_for_ranks(command: Command) -> None:
    """Wait until each rank has written five steps."""
    run = command.wait_for_run()
    command.until(lambda: min(len(read_steps(run.of_rank(rank).steps)[0]) for rank in (0, 1)) >= 5)


def assert_over(command: Command, state: str, *reason: str) -> None:
    """Check that all ranks have ended, finished steps are kept, and the state has the reason."""
    assert command.children() == []
    assert command.code == 1, command.stderr
    assert command.state()["state"] == command.summary()["state"] == state
    assert [words for words in reason if words not in command.state()["reason"]] == [], command.state()
    ranks, _ = read_ranks(command.run)
    assert len(ranks) == 2
    assert command.summary()["steps"]["total"] == min(map(len, ranks)) >= 5
    assert "Traceback" not in command.stderr


def test_killed_rank_is_named(tmp_path):
    """`test_killed_stage_is_named` kills rank 0."""
    with Command(write_spec(tmp_path, **ON_TWO), tmp_path / "out") as command:
        wait_for_ranks(command)
        ranks_of(command)[1].kill()
        command.finish()
    assert_over(command, "error", "rank 1: killed by SIGKILL from outside")
    assert command.state()["rank"] == 1


def impatient(place: Path) -> None:
    """Treat the run as hung once the file exists."""
    progress.Watchdog.limit_s = lambda _: 0.0 if place.exists() else None


def test_hanging_rank_is_named(tmp_path):
    place = tmp_path / "hung"
    with Command(write_spec(tmp_path, **ON_TWO), tmp_path / "out", before=partial(impatient, place)) as command:
        wait_for_ranks(command)
        ranks_of(command)[1].suspend()
        place.touch()
        command.finish()
    assert_over(command, "timeout", "launch.no_step_s", "rank 1 is behind the others")


def greedy() -> None:
    """Let rank 1 run out of memory in its seventh step."""
    from transformers import Trainer

    training_step = Trainer.training_step

    def ask_and_train(trainer: Trainer, *arguments: Any, **others: Any) -> Any:
        if torch.distributed.get_rank() == 1 and trainer.state.global_step == 6:
            torch.empty(2**60, dtype=torch.uint8)
        return training_step(trainer, *arguments, **others)

    Trainer.training_step = ask_and_train


def test_rank_without_memory_is_named(tmp_path):
    with Command(write_spec(tmp_path, **ON_TWO), tmp_path / "out", before=greedy) as command:
        command.finish()
    assert_over(command, "oom", "rank 1: out of memory (host)")


def drifting() -> None:
    """Let the weights of rank 1 differ from those of rank 0."""
    from transformers import Trainer

    training_step = Trainer.training_step

    def change_and_train(trainer: Trainer, *arguments: Any, **others: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            next(each for each in trainer.model.parameters() if each.requires_grad).data += 1e-3
        return training_step(trainer, *arguments, **others)

    Trainer.training_step = change_and_train


def test_rank_with_other_weights_is_named(tmp_path):
    parts = {"dataset": DATA, "train": {"batch_size": 2, "max_steps": 2}, "launch": {"gpus": 2}}
    with Command(write_spec(tmp_path, **parts), tmp_path / "out", before=drifting) as command:
        command.finish()
    assert command.code == 1
    assert "the weights of rank 1 differ after step 1" in command.state()["reason"]


def test_tp_needs_divisible_heads(tmp_path):
    parts = ENDLESS | {"launch": {"gpus": 3, "strategy": "tp"}}
    with Command(write_spec(tmp_path, **parts), tmp_path / "out") as command:
        command.finish()
    assert (command.code, command.children()) == (2, [])
    assert "3 GPUs cannot share the 2 key heads of tiny/qwen3 evenly" in command.stderr


def stuck(place: Path) -> None:
    """Let rank 0 buffer its rows on a slow device, and rank 1 hang in its seventh step."""
    from transformers import Trainer

    from ftbench.worker.measure import recorder

    training_step, start = Trainer.training_step, recorder.Recorder.start

    def start_slowly(made: recorder.Recorder, *arguments: Any) -> None:
        if rank_0 := torch.distributed.get_rank() == 0:
            recorder.TICK_S = 3600.0
        start(made, *arguments)
        if rank_0:
            made.clock.wait = lambda mark=None: time.sleep(0 if mark else 2 * rendezvous.GRACE_S)

    def wait_or_train(trainer: Trainer, *arguments: Any, **others: Any) -> Any:
        if torch.distributed.get_rank() == 1 and trainer.state.global_step == 6:
            place.touch()
            time.sleep(3600)
        return training_step(trainer, *arguments, **others)

    Trainer.training_step, recorder.Recorder.start = wait_or_train, start_slowly


def test_ctrl_c_keeps_the_finished_steps_of_all_ranks(tmp_path):
    place = tmp_path / "stuck"
    with Command(write_spec(tmp_path, **ON_TWO), tmp_path / "out", before=partial(stuck, place)) as command:
        command.until(place.exists)
        command.send(signal.SIGINT)
        command.finish()
    assert (command.code, command.state()["state"], command.children()) == (130, "interrupted", [])
    assert command.state()["reason"].endswith("interrupted by a signal")
    assert command.summary()["steps"]["total"] == 6


# --- several machines ------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """Return a function that starts the command of one of two machines, both on this host."""
    (port,) = free_ports(1)

    def begun(number: int, folder: Path, **parts: Any) -> Command:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": number}.items():
            monkeypatch.setenv(name, str(value))
        return Command(write_spec(folder, **parts), folder / "out")

    begun.port = port
    return begun


ON_TWO_MACHINES = {"launch": {"gpus": 2, "nodes": 2}}


def test_two_machines_train_the_same_as_two_gpus(pair, machine, tmp_path):
    _, two = pair("ddp", **LORA)
    parts = {"dataset": DATA, **LORA, **ON_TWO_MACHINES, "train": rundir.read_json(two.run.spec_json)["train"]}
    with machine(1, tmp_path, **parts) as second, machine(0, tmp_path, **parts) as first:
        assert (second.finish().code, first.finish().code) == (0, 0), first.stderr + second.stderr
    assert learned(first) == learned(two)
    assert figures(first) == figures(two)
    assert second.document() == first.document()
    assert {path.name for path in first.run.path.glob("*node*")} == {"log.node1.txt"}


def test_lost_machine_is_named(machine, tmp_path):
    parts = ENDLESS | ON_TWO_MACHINES
    with machine(0, tmp_path, **parts) as first, machine(1, tmp_path, **parts) as second:
        wait_for_ranks(first)
        gone = psutil.Process(second.process.pid)
        for process in (*gone.children(recursive=True), gone):
            with suppress(psutil.NoSuchProcess):  # already ended
                process.kill()
        first.finish()
    assert_over(first, "error", "rank 1: its machine (node 1) was lost")


def test_port_in_use_is_reported(machine, tmp_path):
    with socket.create_server(("", machine.port)), machine(0, tmp_path, **ENDLESS | ON_TWO_MACHINES) as first:
        first.finish()
    assert first.code == 3
    assert f"MASTER_PORT {machine.port}: Address already in use" in first.state()["reason"]


def test_missing_variables_are_reported(tmp_path):
    with Command(write_spec(tmp_path, **ENDLESS | ON_TWO_MACHINES), tmp_path / "out") as command:
        command.finish()
    assert command.code == 3
    assert "NODE_RANK (its number, 0 to 1" in command.stderr
    assert "waiting for the other machines" not in command.stderr
