"""One run in several processes, over gloo: SGD without clipping tells whether they learn what one process learns at the
same global batch, and whatever ends one of them ends all and is named."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import torch

from commands import ENDLESS, Command, write_spec
from ftbench.errors import MissingError, SpecError
from ftbench.estimate.memory.share import gathered, share
from ftbench.estimate.workload.model import shape_of
from ftbench.estimate.workload.plan import plan_of
from ftbench.estimate.workload.sharding import rank_model, sharding_of
from ftbench.families import FAMILIES
from ftbench.families.vision import TRAINED
from ftbench.launch import follow, trl
from ftbench.spec import strategies
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.store.ranks import read_ranks
from ftbench.store.steps import read_steps
from ftbench.worker import trainer
from ftbench.worker.parallel import meeting, tp
from waiting import free_ports

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("cache")]
SGD = {"optimizer": "sgd", "max_grad_norm": 1e9, "learning_rate": 0.02, "lr_scheduler": "constant"}
# 21 samples of many lengths: in the last step of an epoch one rank has more samples than another.
DATA = {"name": "synthetic", "samples": 21, "mean_length": 20, "max_length": 64, "eval_samples": 3}


def run(folder: Path, gpus: int, strategy: str, before: Any = None, **parts: Any) -> Command:
    """A run that ended well on this number of ranks; each accumulates over so many batches that a step is the same."""
    launch = {"gpus": gpus, "strategy": strategy if gpus > 1 else "none"}
    shares = {"tp": 1, "ep": 1, "cp": 1, "tp+fsdp": max(1, gpus // 2)}.get(strategy, gpus)
    epochs = 2 if parts.get("method") == LORA["method"] else 1
    train = {"batch_size": 2, "gradient_accumulation_steps": 4 // shares, "epochs": epochs, **SGD}
    train |= parts.get("train", {})
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
    """One process, and two ranks of it, of a method and more of the spec; each trained once."""
    runs: dict[str, Command] = {}

    def trained(strategy: str, gpus: int = 2, **parts: Any) -> tuple[Command, Command]:
        folder, key = tmp_path_factory.mktemp("ranks"), json.dumps([strategy, gpus, parts])
        alone = json.dumps(parts)
        if alone not in runs:
            runs[alone] = run(folder / "one", 1, strategy, **parts)
        if key not in runs:
            runs[key] = run(folder / "several", gpus, strategy, **parts)
        return runs[alone], runs[key]

    return trained


KEPT = {"measure": {"save_adapter": True}}
LORA = {"method": {"name": "lora"}, **KEPT}
FULL, QLORA = {"method": {"name": "full"}}, {"method": {"name": "qlora"}}
HALF = {"train": {"precision": "bf16"}}
AGAIN = {"optimizations": {"gradient_checkpointing": True}}
EXPERTS = {"model": {"id": "tiny/qwen3-moe", "weights": "random"}}
# A head of its own weights, which its forward pass alone would gather: the loss over chunks takes them without it.
HEAD = {"model": {"id": "tiny/llama", "weights": "random"}, "optimizations": {"chunked_loss": True}}
# Pictures of any size. Where weights are divided every rank has some in each step; else the last may leave one without.
PICTURES = {"name": "images", "samples": 32, "image_size": [56, 40], "image_sizes": "photographs", "mean_length": 12,
            "max_length": 256, "eval_samples": 4}  # fmt: skip
LLAVA, QWEN25, QWEN3 = (
    {"model": {"id": f"tiny/{name}", "weights": "random"}, "dataset": PICTURES}
    for name in ("llava-next", "qwen2.5-vl", "qwen3-vl")
)
NO_DEEPSPEED = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")
STAGES = [(1, FULL), (1, QLORA), (2, LORA), (3, LORA), (2, QLORA), (3, QLORA)]
PROVEN = [
    *[("ddp", LORA), ("ddp", FULL), ("ddp", QLORA), ("fsdp", LORA), ("fsdp", FULL), ("fsdp", HALF)],
    *[pytest.param(f"zero{stage}", parts, marks=NO_DEEPSPEED) for stage, parts in STAGES],
    ("ep", EXPERTS | FULL),
    pytest.param("tp", EXPERTS, marks=pytest.mark.exhaustive),
    ("tp", FULL),
    ("tp", LORA),
    ("ep", EXPERTS | LORA),
    pytest.param("tp", FULL | KEPT, marks=pytest.mark.exhaustive),
    pytest.param("ep", EXPERTS | FULL | KEPT, marks=pytest.mark.exhaustive),
    ("fsdp", LORA | AGAIN),
    pytest.param("cp", LORA | AGAIN, marks=pytest.mark.exhaustive),
    ("cp", LORA),
    pytest.param("cp", FULL, marks=pytest.mark.exhaustive),
    ("fsdp", HEAD),
    ("ddp", QWEN3 | {"dataset": PICTURES | {"samples": 26, "eval_samples": 2}}),
    ("fsdp", LLAVA),
    ("fsdp", QWEN3 | FULL),
    *[
        pytest.param(strategy, parts, marks=pytest.mark.exhaustive)
        for strategy, parts in (
            ("ddp", LLAVA),
            ("ddp", QWEN25),
            ("fsdp", QWEN25),
            ("fsdp", QWEN3),
            ("ddp", LLAVA | FULL),
            ("fsdp", QWEN25 | FULL),
            ("fsdp", LLAVA | FULL),
            ("tp", QWEN25 | FULL),
            ("tp", LLAVA),
        )
    ],
    *[pytest.param("zero3", parts, marks=[NO_DEEPSPEED, pytest.mark.exhaustive]) for parts in (LLAVA, QWEN25, QWEN3)],
    pytest.param("fsdp", HEAD | FULL, marks=pytest.mark.exhaustive),
]


def assert_same_adapters(one: Command, several: Command) -> None:
    """What both saved can be read, and is the same."""
    from safetensors.torch import load_file

    saved, others = (load_file(*each.run.adapter.glob("*.safetensors")) for each in (one, several))
    assert len(saved) > 0
    assert saved.keys() == others.keys()
    assert all(others[name].allclose(saved[name], rtol=1e-3, atol=1e-6) for name in saved)


@pytest.mark.parametrize(("strategy", "parts"), PROVEN, ids=str)
def test_two_ranks_learn_what_one_process_learns(pair, strategy, parts):
    """With accumulation, uneven lengths, a last step that not all ranks have samples for, and evaluation."""
    one, two = pair(strategy, **parts)
    assert learned(two) == learned(one)
    for name in ("loss", "grad_norm"):
        # Of adapters in 16 bits, beside 4-bit weights, one process takes the norm in 16 bits too; no loss is rounded.
        rel = 2**-8 if name == "grad_norm" and parts in (QLORA, HALF) else 1e-4
        assert figures(two, name) == pytest.approx(figures(one, name), rel=rel)
    assert len({row.loss for row in one.steps()}) > 3
    assert dataset_of(two)["order_hash"] == dataset_of(one)["order_hash"]
    if "measure" in parts:
        assert_same_adapters(one, two)


def test_tp_is_refused_of_the_families_that_transformers_has_no_plan_to_divide():
    """Once it has one this fails, and the refusal can go."""
    from transformers import CONFIG_MAPPING

    plans = {name: CONFIG_MAPPING[name]().get_text_config().base_model_tp_plan for name in (*FAMILIES, *TRAINED)}
    assert {name for name, plan in plans.items() if not plan} == {*strategies._UNDIVIDED}
    with pytest.raises(ValueError, match="no plan by which tp divides tiny/qwen3-vl: use fsdp"):
        Experiment.model_validate({"name": "a", **QWEN3, "launch": {"gpus": 2, "strategy": "tp"}})
    config, spec = CONFIG_MAPPING["qwen3_vl"](), SimpleNamespace(model=SimpleNamespace(id="a/b"))
    with pytest.raises(SpecError, match="no plan by which tp divides a/b: use fsdp"):
        tp.require_even(spec, config, "launch.gpus", 2)


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
def test_batches_without_images_are_rejected_if_weights_are_sharded(train, evaluation, most, key):
    values = {"name": "a", **LLAVA, "train": {"batch_size": 2, "max_steps": most}}
    spec = Experiment.model_validate(values | {"launch": {"gpus": 2, "strategy": "fsdp"}})
    message = rf"a batch of dataset\.{key} has no image, .* multiple of 4, .* use ddp$"
    with pytest.raises(SpecError, match=message) if key else nullcontext():
        trainer._check_pictures(spec, SimpleNamespace(train=train, evaluation=evaluation), 4)


def test_each_rank_is_trained_on_its_share_in_order(pair):
    one, two = pair("ddp", **LORA)
    ranks, warnings = read_ranks(two.run)
    assert warnings == []
    assert [{row.rank for row in rows} for rows in ranks] == [{0}, {1}]
    assert sum(row.real_tokens for rows in ranks for row in rows if row.phase == "train") == sum(
        row.real_tokens for row in one.steps() if row.phase == "train"
    )
    assert all(rows != ranks[0] for rows in ranks[1:])


def test_the_run_says_what_it_ran_on_and_how_large_its_batch_was(pair):
    _, two = pair("ddp", **LORA)
    assert "-lora-ddp-2gpus-b2-" in two.run.run_id
    assert two.summary()["ranks"]["count"] == 2
    assert all((two.run.path / f"{name}.rank1.json").exists() for name in ("state", "applied", "phases"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "cp", pytest.param("zero3", marks=NO_DEEPSPEED)])
def test_the_adapters_of_several_ranks_are_those_of_one(pair, strategy):
    from safetensors.torch import load_file

    one, two = (load_file(each.run.adapter / "adapter_model.safetensors") for each in pair(strategy, **LORA))
    assert one.keys() == two.keys()
    assert all(two[name].allclose(one[name], rtol=1e-3, atol=1e-6) for name in one)


def test_a_rank_keeps_its_share_of_every_parameter_under_fsdp(pair):
    _, two = pair("fsdp", **FULL)
    parallel = rundir.read_json(two.run.applied)["parallel"]
    assert (parallel["strategy"], parallel["ranks"], parallel["global_batch"]) == ("fsdp", 2, 8)
    assert parallel["sharded"] == 2 * 11 + 2  # of two layers, and norm and embedding, which is the head
    assert parallel["elements_of_rank"] * 2 == parallel["elements"] == two.summary()["parameters"]["total"]


@pytest.mark.parametrize(("strategy", "gpus"), [("tp", 2), pytest.param("tp+fsdp", 4, marks=pytest.mark.exhaustive)])
def test_a_rank_holds_as_much_as_an_estimate_says(pair, strategy, gpus):
    _, several = pair(strategy, gpus, **FULL)
    values = rundir.read_json(several.run.spec_json)
    spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields})
    division = sharding_of(spec.launch)
    expected = rank_model(shape_of(spec.model), division).total / division.holders
    assert rundir.read_json(several.run.applied)["parallel"]["elements_of_rank"] == expected


def test_each_rank_has_its_part_of_every_sequence_under_cp(pair):
    """Rows are filled up to two equal parts a rank, and each layer's keys and values went round in the first step."""
    one, two = pair("cp", **LORA)
    parallel = rundir.read_json(two.run.applied)["parallel"]
    assert (parallel["shares"], parallel["global_batch"]) == (1, 8)
    assert parallel["rounds"] == 2 * 4  # layers and batches
    assert parallel["elements_of_rank"] * 2 == parallel["elements"]
    assert all(row.padded_tokens % 4 == 0 for row in two.steps())
    assert any(row.padded_tokens % 4 for row in one.steps())


@NO_DEEPSPEED
def test_a_rank_keeps_its_share_of_the_stage_under_zero(pair):
    """The optimizer's states of half of what is trained; of the weights all of them, or half in the third stage."""
    for strategy, parts, kept in (("zero1", FULL, 1), ("zero2", LORA, 1), ("zero3", LORA, 2)):
        _, two = pair(strategy, **parts)
        parallel = rundir.read_json(two.run.applied)["parallel"]
        assert parallel["optimizer_elements_of_rank"] * 2 == parallel["trained_elements"]
        assert parallel["elements_of_rank"] * kept == parallel["elements"] == two.summary()["parameters"]["total"]
    assert parallel["sharded"] == 52
    assert parallel["released"] > 14  # of each layer seven matrices, which are larger than what stays whole


@NO_DEEPSPEED
@pytest.mark.parametrize("parts", [LORA, FULL], ids=str)
def test_weights_are_released_layer_by_layer_where_activations_are_made_again_under_zero(pair, parts):
    """Of frozen weights too; nothing but the table of the vocabulary, whose input takes no gradient, may wait."""
    one, two = pair("zero3", **parts, optimizations={"gradient_checkpointing": True})
    parallel = rundir.read_json(two.run.applied)["parallel"]
    assert parallel["released"] > 14
    assert parallel["kept"] <= 1
    assert parallel["gathered_whole"] == 2  # layers, each at once
    assert figures(two) == pytest.approx(figures(one), rel=1e-4)


def fetching(place: Path) -> None:
    """Let rank 0 write for each module, once DeepSpeed knows their order, how many weights a layer lacks as it is
    needed, and how many are whole then."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload as Gathering
    from deepspeed.utils import z3_leaf_module

    def watched(fetch: Any) -> Any:
        def look(gathering: Any, module: Any) -> None:
            weights = [weight for weight in module.parameters() if z3_leaf_module(module)]
            lacking = sum(weight.ds_numel for weight in weights if weight.ds_status.name == "NOT_AVAILABLE")
            fetch(gathering, module)
            there = [weight.ds_numel for weight in gathering.module.parameters()
                     if not weight.ds_persist and weight.ds_status.name != "NOT_AVAILABLE"]  # fmt: skip
            if torch.distributed.get_rank() == 0 and gathering.get_param_coordinator().is_complete_trace():
                with place.open("a") as file:
                    file.write(f"{lacking} {sum(there)}\n")

        return look

    for name in ("pre_sub_module_forward_function", "pre_sub_module_backward_function"):
        setattr(Gathering, name, watched(getattr(Gathering, name)))


@NO_DEEPSPEED
def test_a_layer_is_fetched_while_another_computes_and_no_more_of_them_are_there_than_estimated(tmp_path):
    """Of weights whose table of words is no head: at the most head, table and a layer are whole."""
    parts = {**FULL, "model": HEAD["model"], "optimizations": {"gradient_checkpointing": True}}
    parts |= {"dataset": DATA | {"eval_samples": 0}, "train": {"batch_size": 2, "max_steps": 4, **SGD}}
    spec = write_spec(tmp_path, **parts, launch={"gpus": 2, "strategy": "zero3"})
    with Command(spec, tmp_path / "out", before=partial(fetching, tmp_path / "fetched")) as command:
        assert command.finish().code == 0, command.stderr
    fetched = [[*map(int, line.split())] for line in (tmp_path / "fetched").read_text().splitlines()]
    values = rundir.read_json(command.run.spec_json)
    spec = Experiment.model_validate({key: values[key] for key in Experiment.model_fields})
    model = shape_of(spec.model)
    expected = gathered(model, replace(plan_of(spec, model), compute=1), share(sharding_of(spec.launch)))
    assert {lacking for lacking, _ in fetched} == {0}
    told = rundir.read_json(command.run.applied)["parallel"]
    assert told["fetched_ahead"] == pytest.approx(model.largest_layer, rel=0.01)  # but for norms, which stay whole
    assert max(there for _, there in fetched) == pytest.approx(max(expected), rel=0.01)


def test_weights_that_stay_gathered_through_the_backward_pass_are_said_under_zero(monkeypatch):
    zero = importlib.import_module("ftbench.worker.parallel.zero")
    facts = {"optimizer_elements_of_rank": 8, "trained_elements": 16, "elements_of_rank": 8, "elements": 16}
    facts |= {"released": 14, "kept": 12}
    monkeypatch.setattr(zero, "applied", lambda trainer: facts)
    engine = type("DeepSpeedEngine", (), {"zero_optimization_stage": lambda self: 3, "dp_world_size": 2})()
    spec = SimpleNamespace(launch=SimpleNamespace(strategy="zero3", ranks=2))
    said = zero.verify(SimpleNamespace(model_wrapped=engine), spec)
    assert said == [
        "launch.strategy is zero3 and of 14 weights 12 stay gathered until the backward pass ends",
    ]
    facts["kept"] = 1
    assert zero.verify(SimpleNamespace(model_wrapped=engine), spec) == []


@NO_DEEPSPEED
@pytest.mark.parametrize(("strategy", "offload"), [("zero2", "optimizer"), ("zero3", "params")])
def test_what_waits_in_host_memory_is_learned_as_well(tmp_path, pair, strategy, offload):
    one, _ = pair("ddp", **LORA)
    launch = {"gpus": 2, "strategy": strategy, "offload": offload}
    train = rundir.read_json(one.run.spec_json)["train"] | {"gradient_accumulation_steps": 2}
    with Command(write_spec(tmp_path, dataset=DATA, **LORA, train=train, launch=launch), tmp_path / "out") as command:
        assert command.finish().code == 0, command.stderr
    assert learned(command) == learned(one)
    assert figures(command) == pytest.approx(figures(one), rel=1e-4)


def dealt() -> None:
    """Let a rank end that has gradients of a batch, and no share of them."""
    from transformers import Trainer

    training_step = Trainer.training_step

    def train_and_look(trainer: Trainer, model: Any, *arguments: Any, **others: Any) -> Any:
        loss = training_step(trainer, model, *arguments, **others)
        assert all(parameter.grad is not None for parameter in model.parameters())
        return loss

    Trainer.training_step = train_and_look


def test_whole_gradients_do_not_wait_for_the_last_batch_of_a_step_under_fsdp(tmp_path):
    parts = {
        **FULL,
        "train": {"max_steps": 1, "gradient_accumulation_steps": 2},
        "launch": {"gpus": 2, "strategy": "fsdp"},
    }
    with Command(write_spec(tmp_path, dataset=DATA, **parts), tmp_path / "out", before=dealt) as command:
        assert command.finish().code == 0, command.stderr


FOUR = [
    ("ddp", LORA),
    ("tp+fsdp", LORA),
    ("tp+fsdp", FULL),
    ("tp+fsdp", EXPERTS),
    ("tp+fsdp", FULL | HALF | {"model": {"id": "tiny/qwen3", "weights": "random", "dtype": "bfloat16"}}),
    ("fsdp", FULL),
    ("ep", EXPERTS | FULL),
    ("tp+fsdp", LLAVA | FULL),
    ("tp+fsdp", LORA | AGAIN),
    ("tp+fsdp", FULL | AGAIN | KEPT),
]
FOUR = FOUR[:2] + [pytest.param(*case, marks=pytest.mark.exhaustive) for case in FOUR[2:]]


@pytest.mark.parametrize(("strategy", "parts"), FOUR, ids=str)
def test_four_ranks_learn_what_one_process_learns(pair, strategy, parts):
    """The last step has samples for three of them, or for three rows of two shares."""
    one, four = pair(strategy, 4, **parts)
    assert learned(four) == learned(one)
    assert figures(four, "loss") == pytest.approx(figures(one, "loss"), rel=1e-4)
    assert figures(four, "grad_norm") == pytest.approx(
        figures(one, "grad_norm"), rel=2**-8 if "train" in parts else 1e-4
    )
    assert four.summary()["ranks"]["count"] == 4
    if "measure" in parts:
        assert_same_adapters(one, four)


def test_a_rank_of_a_mesh_keeps_its_share_of_its_share_and_adapters_are_those_of_one(pair):
    one, four = pair("tp+fsdp", 4, **LORA)
    parallel = rundir.read_json(four.run.applied)["parallel"]
    assert (parallel["shares"], parallel["global_batch"], parallel["sharded"]) == (2, 8, 2 * (11 + 14) + 2)
    assert parallel["elements"] / 4 <= parallel["elements_of_rank"] < 0.26 * parallel["elements"]
    rows = [[(row.step, row.real_tokens) for row in rows if row.phase == "train"] for rows in read_ranks(four.run)[0]]
    assert rows[0] == rows[1] != rows[2] == rows[3]
    assert_same_adapters(one, four)


# --- what is refused while libraries do not do it --------------------------------------------------------------------


def train(optimizer: str) -> dict[str, Any]:
    return {"train": {"batch_size": 2, "max_steps": 1, "optimizer": optimizer}}


exhaustive = partial(pytest.param, marks=pytest.mark.exhaustive)


def lifted() -> None:
    """Let a run begin whatever its strategy refuses."""
    strategies.incompatibilities = lambda spec: []
    trl.refusals = lambda spec, capability: []


@pytest.mark.parametrize(
    ("launch", "parts", "reason"),
    [
        ({"strategy": "fsdp"}, QLORA, "q_proj.base_layer.weight and 13 more"),
        ({"strategy": "tp"}, QLORA, "'DTensor' object has no attribute 'compress_statistics'"),
        (
            {"strategy": "fsdp"},
            FULL | train("adamw_bnb_8bit"),
            "optimizer_update_32bit.default does not have a sharding",
        ),
        exhaustive({"strategy": "tp"}, FULL | train("adamw_torch_fused"), "AdamW is not fused"),
        exhaustive(
            {"strategy": "ep"},
            EXPERTS | {"method": {"name": "lora", "experts": True}},
            "aten.baddbmm.default got mixed torch",
        ),
        ({"strategy": "fsdp", "offload": "params"}, LORA, "Cannot access accelerator device when none is available"),
        ({"strategy": "cp"}, LORA | {"optimizations": {"chunked_loss": True}}, "out of bounds"),
    ],
    ids=str,
)
def test_what_is_refused_goes_wrong_where_it_is_tried(tmp_path, launch, parts, reason):
    """Once a library mends it this fails, and the refusal can go."""
    parts = {"dataset": DATA, "train": {"batch_size": 2, "max_steps": 1}, **parts, "launch": {"gpus": 2} | launch}
    with Command(write_spec(tmp_path, **parts), tmp_path / "out", before=lifted) as command:
        command.finish()
    assert reason in command.state()["reason"], command.state()


def ulysses(stage: int) -> None:
    """Let DeepSpeed's Ulysses train beside a stage of ZeRO, as accelerate has it."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    from ftbench.worker.parallel import zero

    def arguments(spec: Experiment) -> dict[str, Any]:
        launch = spec.launch.model_copy(update={"strategy": f"zero{stage}"})
        attention = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        sequence = ParallelismConfig(sp_size=2, sp_handler=attention)
        return zero.arguments(spec.model_copy(update={"launch": launch})) | {"parallelism_config": sequence}

    def prepare(made: Any) -> None:
        zero.prepare(made)
        importlib.import_module("deepspeed").init_distributed("gloo")

    lifted()
    sys.modules["ftbench.worker.parallel.ulysses"] = SimpleNamespace(
        arguments=arguments, prepare=prepare, verify=lambda trainer, spec: [], applied=lambda trainer: {}
    )


@NO_DEEPSPEED
@pytest.mark.parametrize(("stage", "times"), [(2, 2.0), (3, 1.0)])
def test_ulysses_doubles_gradients_or_weighs_batches_alike(tmp_path, stage, times):
    """Rows of as many tokens each hide that batches are weighed alike, which the run says of itself."""
    rows = {"name": "synthetic", "samples": 8, "length": 32, "max_length": 32}
    train = {"batch_size": 1, "gradient_accumulation_steps": 4, **SGD}
    parts = {"dataset": rows, "optimizations": {"padding_free": True}, "measure": {"allow_fallback": True}}
    runs = []
    for name, launch in {"one": {}, "two": {"gpus": 2, "strategy": "ulysses"}}.items():
        (folder := tmp_path / name).mkdir()
        spec = write_spec(folder, **parts, train=train, launch=launch)
        with Command(spec, folder / "out", before=partial(ulysses, stage)) as command:
            assert command.finish().code == 0, command.stderr
        runs.append(command)
    one, two = (command.steps()[0] for command in runs)
    assert two.loss == pytest.approx(one.loss)
    assert two.grad_norm == pytest.approx(times * one.grad_norm, rel=1e-4)
    assert "divides its loss by the tokens of each rank" in json.dumps(rundir.read_json(runs[1].run.applied))


# --- bad ends --------------------------------------------------------------------------------------------------------

ON_TWO = {**ENDLESS, "launch": {"gpus": 2}}


def ranks_of(command: Command) -> list[psutil.Process]:
    """The processes that train, in the order of their ranks, in which they were begun."""
    return sorted(command.children(), key=lambda each: (each.create_time(), each.pid))[-2:]


def wait_for_ranks(command: Command) -> None:
    """Until each rank has written five steps."""
    run = command.wait_for_run()
    command.wait_until(lambda: min(len(read_steps(run.of_rank(rank).steps)[0]) for rank in (0, 1)) >= 5)


def assert_over(command: Command, state: str, *reason: str) -> None:
    """All ranks have ended, what they had finished is kept, and the state gives the reason."""
    assert command.children() == []
    assert command.code == 1, command.stderr
    assert command.state()["state"] == command.summary()["state"] == state
    assert [words for words in reason if words not in command.state()["reason"]] == [], command.state()
    ranks, _ = read_ranks(command.run)
    assert len(ranks) == 2
    assert command.summary()["steps"]["total"] == min(map(len, ranks)) >= 5
    assert "Traceback" not in command.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_all_and_is_named(tmp_path, rank):
    with Command(write_spec(tmp_path, **ON_TWO), tmp_path / "out") as command:
        wait_for_ranks(command)
        ranks_of(command)[rank].kill()
        command.finish()
    assert_over(command, "error", f"rank {rank}: killed by SIGKILL from outside")
    assert command.state()["rank"] == rank


def impatient(place: Path) -> None:
    """Take a run for hung once the file is there."""
    follow.Watchdog.limit_s = lambda _: 0.0 if place.exists() else None


def test_a_rank_that_hangs_ends_all_and_is_named(tmp_path):
    place = tmp_path / "hung"
    with Command(write_spec(tmp_path, **ON_TWO), tmp_path / "out", before=partial(impatient, place)) as command:
        wait_for_ranks(command)
        ranks_of(command)[1].suspend()
        place.touch()
        command.finish()
    assert_over(command, "timeout", "launch.no_step_s", "rank 1 is behind the others")


def greedy() -> None:
    """Let a rank's seventh step ask torch for more than any machine has."""
    from transformers import Trainer

    training_step = Trainer.training_step

    def ask_and_train(trainer: Trainer, *arguments: Any, **others: Any) -> Any:
        if torch.distributed.get_rank() == 1 and trainer.state.global_step == 6:
            torch.empty(2**60, dtype=torch.uint8)
        return training_step(trainer, *arguments, **others)

    Trainer.training_step = ask_and_train


def test_a_rank_that_runs_out_of_memory_ends_all_and_is_named(tmp_path):
    with Command(write_spec(tmp_path, **ON_TWO), tmp_path / "out", before=greedy) as command:
        command.finish()
    assert_over(command, "oom", "rank 1: out of memory (host)")


def test_heads_that_cannot_be_dealt_are_told(tmp_path):
    parts = ENDLESS | {"launch": {"gpus": 3, "strategy": "tp"}}
    with Command(write_spec(tmp_path, **parts), tmp_path / "out") as command:
        command.finish()
    assert (command.code, command.children()) == (2, [])
    assert "tp deals the 2 heads of keys of tiny/qwen3 evenly, and 2 is no multiple of 3" in command.state()["reason"]


def test_shares_that_wait_in_host_memory_want_a_gpu(tmp_path):
    parts = ENDLESS | {"launch": {"gpus": 2, "strategy": "fsdp", "offload": "params"}}
    with Command(write_spec(tmp_path, **parts), tmp_path / "out") as command:
        command.finish()
    assert command.code == 3
    assert "params with fsdp needs a GPU" in command.stderr


def stuck(place: Path) -> None:
    """Let rows of rank 0 wait in memory and its device be slow, and rank 1 stay in its seventh step, which it tells."""
    from transformers import Trainer

    from ftbench.worker.measure import recorder

    training_step, start = Trainer.training_step, recorder.Recorder.start

    def start_slowly(made: recorder.Recorder, *arguments: Any) -> None:
        if rank_0 := torch.distributed.get_rank() == 0:
            recorder.TICK_S = 3600.0
        start(made, *arguments)
        if rank_0:
            made.clock.wait = lambda mark=None: time.sleep(0 if mark else 2 * meeting.ANSWER_S)

    def wait_or_train(trainer: Trainer, *arguments: Any, **others: Any) -> Any:
        if torch.distributed.get_rank() == 1 and trainer.state.global_step == 6:
            place.touch()
            time.sleep(3600)
        return training_step(trainer, *arguments, **others)

    Trainer.training_step, recorder.Recorder.start = wait_or_train, start_slowly


def test_ctrl_c_ends_all_ranks_and_keeps_what_a_rank_had_finished_that_waits_for_another(tmp_path):
    place = tmp_path / "stuck"
    with Command(write_spec(tmp_path, **ON_TWO), tmp_path / "out", before=partial(stuck, place)) as command:
        command.wait_until(place.exists)
        command.send(signal.SIGINT)
        command.finish()
    assert (command.code, command.state()["state"], command.children()) == (130, "interrupted", [])
    assert command.state()["reason"].endswith("interrupted by a signal")
    assert command.summary()["steps"]["total"] == 6


# --- several machines ------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """Begins a run's command on one of two machines, which this one plays; they meet at a port that was free."""
    (port,) = free_ports(1)

    def begun(number: int, folder: Path, **parts: Any) -> Command:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": number}.items():
            monkeypatch.setenv(name, str(value))
        return Command(write_spec(folder, **parts), folder / "out")

    begun.port = port
    return begun


ON_TWO_MACHINES = {"launch": {"gpus": 2, "nodes": 2}}


def test_two_machines_train_what_two_gpus_of_one_train(pair, machine, tmp_path):
    _, two = pair("ddp", **LORA)
    parts = {"dataset": DATA, **LORA, **ON_TWO_MACHINES, "train": rundir.read_json(two.run.spec_json)["train"]}
    with machine(1, tmp_path, **parts) as second, machine(0, tmp_path, **parts) as first:
        assert (second.finish().code, first.finish().code) == (0, 0), first.stderr + second.stderr
    assert learned(first) == learned(two)
    assert figures(first) == figures(two)
    assert second.document() == first.document()
    assert {path.name for path in first.run.path.glob("*node*")} == {"log.node1.txt"}


def test_a_machine_that_is_lost_ends_the_run_and_is_named(machine, tmp_path):
    parts = ENDLESS | ON_TWO_MACHINES
    with machine(0, tmp_path, **parts) as first, machine(1, tmp_path, **parts) as second:
        wait_for_ranks(first)
        gone = psutil.Process(second.process.pid)
        for process in (*gone.children(recursive=True), gone):
            with suppress(psutil.NoSuchProcess):  # ended with what had started it
                process.kill()
        first.finish()
    assert_over(first, "error", "rank 1: node 1 has gone without a word")


def test_a_port_that_somebody_has_is_told(machine, tmp_path):
    with socket.create_server(("", machine.port)), machine(0, tmp_path, **ENDLESS | ON_TWO_MACHINES) as first:
        first.finish()
    assert first.code == 3
    assert f"MASTER_PORT {machine.port} cannot be had on node 0: Address already in use" in first.state()["reason"]


def test_machines_have_to_be_told_where_they_meet(tmp_path):
    with Command(write_spec(tmp_path, **ENDLESS | ON_TWO_MACHINES), tmp_path / "out") as command:
        command.finish()
    assert command.code == 3
    assert "NODE_RANK to the number of this one, from 0 to 1" in command.stderr
    assert "waiting for the other machines" not in command.stderr


def test_gpus_without_nccl_are_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(MissingError, match="several GPUs need NCCL and torch"):
        meeting.meet()
