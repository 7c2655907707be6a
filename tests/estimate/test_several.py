"""Estimates for several GPUs: memory, computation and communication of each."""

from __future__ import annotations

import json
import re
import shlex
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from commands import printed_command, typed_spec
from ftbench.core.hardware import find_gpu, gpus
from ftbench.core.rows import StepRow
from ftbench.core.units import GIB
from ftbench.errors import SpecError
from ftbench.estimate.api import problem
from ftbench.estimate.estimates import EstimateRequest, estimate
from ftbench.estimate.memory.estimate import constants, estimate_memory
from ftbench.estimate.memory.phases import GATHERED, MemoryCase, peak, phases
from ftbench.estimate.memory.share import gathered, share
from ftbench.estimate.recommend import request as recommend
from ftbench.estimate.recommend.candidates import launches
from ftbench.estimate.recommend.spec_file import run_command
from ftbench.estimate.time.communication import traffic
from ftbench.estimate.time.duration import MEASURED, estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.time.rates import shipped_coefficients
from ftbench.estimate.time.work import update
from ftbench.estimate.workload.batches import batches_of
from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.lengths import Lengths
from ftbench.estimate.workload.model import trainable_shape
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.estimate.workload.sharding import Sharding, on_gpus, rank_batch, rank_model, sharding_of
from ftbench.facts import architectures
from ftbench.families import describe
from ftbench.spec.experiment import Experiment, Launch
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.spec.load import load
from ftbench.store.rundir import RunDir
from ftbench.store.steps import StepsWriter, read_steps

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import memory_estimates as study
import time_estimates

SMALL = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768, "vocab_size": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip

RESULTS = Path(__file__).resolve().parents[2] / "results" / "h200"

# Parameters of Qwen3-8B: all, of the embedding (the head has as many), and of a layer.
N, WORDS, LAYER = 8_190_735_360, 151_936 * 4096, 192_946_432


def divided(strategy: str, gpus: int, offload: str = "none") -> Sharding:
    return sharding_of(Launch.model_construct(gpus=gpus, strategy=strategy, offload=offload))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tracked():
    """Bytes at the peak of a forward and backward pass of SMALL under fully_shard, by the number of GPUs, as torch's
    own tracker counts them on tensors without memory."""
    torch = pytest.importorskip("torch")
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoModelForCausalLM, Qwen3Config

    def peaks(gpus: int) -> dict[str, int]:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
        mesh = init_device_mesh("cpu", (gpus,))
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                model = AutoModelForCausalLM.from_config(Qwen3Config(**SMALL), attn_implementation="sdpa")
                mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
                wrapping = {"mesh": mesh, "mp_policy": mixed}
                for layer in model.model.layers:
                    fully_shard(layer, **wrapping)
                fully_shard(model.model.embed_tokens, **wrapping)  # as accelerate's fsdp2_prepare_model divides it
                fully_shard([model.model.norm, model.lm_head], **wrapping, reshard_after_forward=False)
                fully_shard(model, **wrapping)
                tracker = FSDPMemTracker(model)
                words = torch.randint(0, 4096, (1, 16))
                with tracker:
                    model(input_ids=words, labels=words).loss.backward()
                (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        finally:
            dist.destroy_process_group()
        return {getattr(name, "name", name): size for name, size in snapshot.items()}

    return {gpus: peaks(gpus) for gpus in (2, 8)}


@pytest.mark.parametrize("gpus", [2, 8])
def test_fsdp_memory_agrees_with_torchs_tracker(tracked, gpus: int) -> None:
    plan = MemoryCase(describe(SMALL), TrainingPlan(full=True), BatchShape(1, 16, 15), sharding=divided("fsdp", gpus))
    named = phases(plan)
    del named["optimizer step"]
    state = next(iter(named.values()))
    expected = peak({name: parts | {"optimizer state": 0} for name, parts in named.items()})[1]
    assert expected == pytest.approx(tracked[gpus]["Total"], rel=0.1)
    assert state["weights"] == pytest.approx(tracked[gpus]["SHARDED_PARAM"], rel=0.01)


# What deepspeed 0.19.8 prints of Qwen3-8B on four GPUs, GiB of each: estimate_zero2_model_states_mem_needs(8190735360,
# 4, 1, offload) and estimate_zero3_model_states_mem_needs(8190735360, 622329856, 4, 1, offload, params).
DEEPSPEED = {("zero2", "none"): 49.58, ("zero2", "optimizer"): 15.26, ("zero3", "none"): 36.65,
             ("zero3", "optimizer"): 6.13, ("zero3", "params"): 2.32}  # fmt: skip


@pytest.mark.parametrize(("strategy", "offload"), DEEPSPEED)
def test_zero_states_agree_with_deepspeeds_estimator(strategy: str, offload: str) -> None:
    """DeepSpeed's estimator counts the largest layer as always gathered.

    It ignores activations and the optimizer's temporary tensor of 4 bytes per updated parameter."""
    shape = describe(architectures()["Qwen/Qwen3-8B"])
    plan = MemoryCase(shape, TrainingPlan(full=True), BatchShape(1, 8, 7), sharding=divided(strategy, 4, offload))
    largest = 2 * shape.parameters["embedding"] if strategy == "zero3" else 0
    named = {phase: parts | ({GATHERED: largest} if GATHERED in parts else {}) for phase, parts in phases(plan).items()}
    size = peak(named)[1] / GIB
    assert DEEPSPEED[strategy, offload] * 0.97 <= size <= 1.1 * DEEPSPEED[strategy, offload] + 0.1


@pytest.mark.parametrize(("checkpointing", "backward", "end"), [
    ("off", 10**9, 2 * WORDS + LAYER), ("full", WORDS + 2 * LAYER, 2 * WORDS + LAYER),
])  # fmt: skip
def test_zero3_gathers_a_head_that_stays_and_layers(checkpointing: str, backward: int, end: int) -> None:
    """One more layer if layers are fetched at once, otherwise DeepSpeed's prefetching; finally the embedding.

    tests/test_several_gpus.py compares the first case with DeepSpeed."""
    shape = describe(architectures()["Qwen/Qwen3-8B"])
    part = share(divided("zero3", 4))
    found = gathered(shape, TrainingPlan(full=True, checkpointing=checkpointing), part)
    assert (found.forward, found.loss) == (found.backward, found.backward)
    assert (found.backward, found.end) == (2 * backward, 2 * end)


@pytest.mark.parametrize("name", ["h100/fsdp-32b", "h100/fsdp-14b-full", "h200/fsdp-14b-full"])
def test_fsdp_needs_the_free_blocks_of_its_streams(name: str) -> None:
    """On two H200, the pool of a full training was 18 GiB larger than its tensors (estimate: 16).

    On two H100, it filled the card."""
    (path,) = RESULTS.parent.glob(f"{name.replace('/', '/two-gpus/')}/*-fsdp-*")
    run = study.measured(RunDir(path))
    assert run is not None
    estimate = run.estimate(constants())
    assert estimate.allocated.expected == pytest.approx(run.allocated, rel=0.005)
    assert estimate.reserved.expected == pytest.approx(run.reserved, rel=0.02)
    assert estimate.device.expected == pytest.approx(run.device, rel=0.025)
    assert estimate.verdict == "fits"


def test_zero3_memory_agrees_with_a_run() -> None:
    """Of Qwen3-14B on two GPUs. Between steps, a GPU keeps its part of weights, gradients and states."""
    (path,) = (RESULTS / "two-gpus/zero3-14b-full").glob("qwen3-14b-full-zero3-2gpus-*")
    run, steps = study.measured(RunDir(path)), read_steps(RunDir(path).steps)[0]
    assert run is not None
    estimate = run.estimate(constants())
    assert estimate.allocated.expected == pytest.approx(run.allocated, rel=0.002)
    stays = 2 * estimate.parts["weights"] + estimate.parts["optimizer state"]  # gradients have the size of weights
    assert stays == pytest.approx(steps[-1].memory_allocated_gb, rel=0.002)


def test_tensor_parallelism_splits_each_matrix() -> None:
    whole = describe(SMALL)
    half = rank_model(whole, divided("tp", 2))
    embedding = 4096 * 256
    assert half.parameters["attention"] * 2 == whole.parameters["attention"]
    assert half.parameters["mlp"] * 2 == whole.parameters["mlp"]
    assert half.parameters["head"] * 2 == whole.parameters["head"]
    assert half.parameters["embedding"] == whole.parameters["embedding"] == embedding
    assert half.parameters["norm"] == whole.parameters["norm"]
    tied = rank_model(describe(SMALL | {"tie_word_embeddings": True}), divided("tp", 2))
    assert tied.parameters["embedding"] * 2 == embedding


def test_a_mesh_shards_the_split_matrices() -> None:
    """Each sends as much of tp as two GPUs would, and gathers half of the weights from three others."""
    spec, column = shared("tp+fsdp", 8), rank_model(describe(architectures()["Qwen/Qwen3-8B"]), divided("tp", 2))
    assert (spec.launch.data_parallel_size, sharding_of(spec.launch).holders) == (4, 4)
    plan = MemoryCase(column, TrainingPlan(full=True), BatchShape(1, 16, 15), sharding=sharding_of(spec.launch))
    assert phases(plan)["forward"]["weights"] == pytest.approx(4 * column.total / 4)
    assert phases(plan)["load"]["weights"] >= 4 * column.total  # it is read before it is spread
    hidden = sent(shared("tp", 2)).waited
    assert sent(spec).waited == pytest.approx(hidden + 2 * 3 / 4 * 2 * column.total / 36, rel=1e-3)
    assert sent(spec).hidden == pytest.approx(2 * 3 / 4 * column.total * (2 * 35 / 36 + 1), rel=1e-3)


def test_full_gradients_do_not_outlive_a_micro_batch() -> None:
    """FSDP deals them after each: it sends them as often, and keeps a share."""
    spec = shared("fsdp", 8, train={"batch_size": 4, "gradient_accumulation_steps": 4})
    assert sent(spec).hidden + sent(spec).waited == pytest.approx(4 * 3 * 7 / 8 * 2 * N, rel=1e-3)


@pytest.fixture(scope="module")
def sparse():
    return describe(architectures()["Qwen/Qwen3-30B-A3B"])


def test_expert_parallelism_splits_experts_and_keeps_the_router(sparse) -> None:
    part = rank_model(sparse, divided("ep", 4))
    assert part.parameters["experts"] * 4 == sparse.parameters["experts"]
    rest = sparse.total - sparse.parameters["experts"]
    assert part.total - part.parameters["experts"] == rest


# --- communication ----------------------------------------------------------------------------------------------------


def shared(strategy: str, gpus: int, **parts) -> Experiment:
    values = {
        "name": "t", "model": {"id": "Qwen/Qwen3-8B", "weights": "random"}, "method": {"name": "full"},
        "dataset": {"name": "synthetic", "samples": 64, "length": 2048}, "train": {"batch_size": 4},
        "optimizations": {"gradient_checkpointing": True}, **parts,
    }  # fmt: skip
    return on_gpus(Experiment.model_validate(values), gpus, strategy)


def sent(spec: Experiment):
    shape = trainable_shape(spec)
    return traffic(spec, shape, [rank_batch(batch, sharding_of(spec.launch)) for batch in batches_of(spec, EVEN)])


EVEN = Lengths((2048,) * 64, 1.0, "exact")


def test_traffic_agrees_with_the_zero_paper() -> None:
    """Rajbhandari et al. 2020, section 7: data parallelism and ZeRO-1 and 2 send 2 N elements a step, ZeRO-3 3 N; each
    by its ring's (n - 1) / n."""
    ring = 7 / 8
    for strategy, times in {"ddp": 2, "zero1": 2, "zero2": 2, "zero3": 3, "fsdp": 3}.items():
        found = sent(shared(strategy, 8))
        assert found.hidden + found.waited == pytest.approx(times * ring * 2 * N, rel=1e-3), strategy


def test_zero3_sends_4_bit_weights_of_qlora() -> None:
    lora, qlora = (sent(shared("zero3", 8, method={"name": name})) for name in ("lora", "qlora"))
    in_16_bits = 2 * WORDS + 36 * 2 * 4096  # about: embedding, head and norms of Qwen3-8B
    ratio = (in_16_bits * 2 + (N - in_16_bits) / 2) / (N * 2)
    assert (qlora.hidden + qlora.waited) / (lora.hidden + lora.waited) == pytest.approx(ratio, rel=0.01)
    assert qlora.copied / lora.copied == pytest.approx(ratio, rel=0.01)


def test_committed_steps_of_several_gpus_are_within_bounds() -> None:
    store = RunHistory.read(RESULTS / "two-gpus")
    rows = time_estimates.several_gpus(store, shipped_coefficients())
    assert {row.run.spec.launch.strategy for row in rows} >= {"ddp", "fsdp", "pp", "zero3"}
    assert all(abs(row.error) <= 0.15 for row in rows)
    assert all(row.is_inside for row in rows)


def test_zero_and_more_than_two_gpus_have_a_wider_range() -> None:
    h200 = next(gpu for gpu in gpus() if gpu.name == "H200 SXM")
    asked = (("fsdp", 2), ("zero3", 2), ("ddp", 2), ("ddp", 4))
    fsdp, zero3, two, four = (estimate_duration(shared(*each), h200).step_s for each in asked)
    assert zero3.high / zero3.expected == pytest.approx(1.25 * fsdp.high / fsdp.expected, rel=0.001)
    assert four.high / four.expected == pytest.approx(1.15 * two.high / two.expected, rel=0.01)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "zero3"])
def test_each_gpu_updates_its_shard_in_float32(strategy: str) -> None:
    """Of each parameter foreach AdamW reads and writes the weight, reads the gradient, reads and writes two moments;
    clipping reads the gradient twice and writes it once: ten times 4 bytes."""
    spec = shared(strategy, 8)
    assert update(spec, trainable_shape(spec)) == {"optimizer": pytest.approx(40 * N / 8)}
    offloaded = on_gpus(spec, 8, strategy, "optimizer" if strategy == "zero1" else "params")
    assert update(offloaded, trainable_shape(offloaded)) == {"optimizer": 0}


def test_fsdp_casts_and_copies_for_its_collectives() -> None:
    """Twice 4 bytes of an eighth are read and 2 written, 2 of all read and written; of gradients 2 of all read and
    written, and of an eighth 2 read and 4 written. Frozen shares are kept in 16 bits."""
    assert sent(shared("fsdp", 8)).copied == pytest.approx(N * (2 * (6 / 8 + 4) + 4 + 6 / 8), rel=1e-3)
    frozen = shared("fsdp", 8, method={"name": "lora"})
    assert sent(frozen).copied == pytest.approx(N * 2 * (4 / 8 + 4), rel=0.01)


@pytest.mark.parametrize(("strategy", "offload", "each"), [
    ("zero2", "optimizer", 16), ("zero3", "optimizer", 16), ("zero3", "params", 18), ("fsdp", "params", 16),
])  # fmt: skip
def test_offloaded_states_agree_with_deepspeeds_estimators(strategy: str, offload: str, each: int) -> None:
    """16 bytes per parameter of the optimizer (stage_1_and_2.py, stage3.py: estimate_zero*_model_states_mem_needs), 18
    with its weights, for all GPUs of a machine together. FSDP's float32 shares are its weights."""
    gpu = next(gpu for gpu in gpus() if gpu.name == "H200 SXM")
    run = on_gpus(shared(strategy, 2), 2, strategy, offload)
    here, waiting = (estimate_memory(on_gpus(run, 2, strategy, name), gpu).host for name in ("none", offload))
    assert (waiting - here) * GIB == pytest.approx(each * N, rel=1e-3)
    machine = {"name": "NVIDIA H200", "memory_gb": 140.4, "compute_capability": [9, 0]}
    told = problem(run, {"gpus": [machine], "cpu": {"memory_gb": 64.0}}, Path("no store"))
    assert told is not None
    assert "this machine has 64.0" in told
    assert "launch.offload" in told


def test_a_full_gpu_adds_cache_flushes() -> None:
    gpu = next(gpu for gpu in gpus() if gpu.name == "H200 SXM")
    free, full = (
        estimate_duration(shared("none", 1, train={"batch_size": batch}, optimizations={}), gpu) for batch in (4, 6)
    )
    assert "flushes" not in free.parts
    assert full.parts["flushes"] == pytest.approx(0.038, abs=0.001)
    assert "flushes its cache" in full.confidence


def test_tensor_parallelism_reduces_hidden_states_four_to_six_times() -> None:
    """Shoeybi et al. 2019 (Megatron-LM), section 3: two all-reduces forward and two backward."""
    spec = shared("tp", 4, optimizations={})
    hidden = 4 * 2048 * 4096 * 2
    assert sent(spec).waited == pytest.approx(36 * 4 * 2 * 3 / 4 * hidden)
    assert sent(shared("tp", 4)).waited == pytest.approx(36 * 6 * 2 * 3 / 4 * hidden)


def test_a_fast_link_nearly_doubles_the_speed() -> None:
    """DDP of LoRA on an H200 reached 1.93 times and more; full weights over PCIe without peer access wait."""
    h200, rtx = (next(gpu for gpu in gpus() if gpu.name == name) for name in ("H200 SXM", "RTX 4090"))
    lora = {"method": {"name": "lora"}}
    one, two = (estimate_duration(shared(*how, **lora), h200) for how in (("none", 1), ("ddp", 2)))
    assert 1.9 < two.tokens_per_s / one.tokens_per_s <= 2
    assert two.gpus == 2
    assert two.joules_for(1000).expected == pytest.approx(one.joules_for(1000).expected, rel=0.1)
    short = {"dataset": {"name": "synthetic", "samples": 64, "length": 128}, "train": {"batch_size": 1}}
    slow, alone = (estimate_duration(shared(*how, **short), rtx) for how in (("ddp", 2), ("none", 1)))
    assert slow.exposed_s > 0.1 * alone.step_s.expected


def test_every_gpu_of_the_table_has_a_link() -> None:
    assert [gpu.name for gpu in gpus() if not gpu.link] == []


def test_the_specs_launch_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    text = "model: {id: Qwen/Qwen3-8B, weights: random}\ndataset: {name: synthetic, samples: 64, length: 512}\n"
    path.write_text(text + "launch: {gpus: 4, strategy: fsdp}\n")
    said = json.loads(estimate(EstimateRequest(path, gpu="H100 SXM5")).document)
    path.write_text(text)
    asked = json.loads(estimate(EstimateRequest(path, gpu="H100 SXM5", gpus=4, strategy="fsdp")).document)
    assert said == asked
    assert said["gpus"][0]["time"]["gpus"] == 4


@pytest.mark.parametrize(("gpus", "strategy", "why"), [
    (3, "tp", "3 GPUs cannot share the 8 key heads of Qwen/Qwen3-8B"),
    (2, "tp+fsdp", "2 GPUs cannot form two or more groups of 2"),
    (2, "ep", "ep needs experts and Qwen/Qwen3-8B has none"),
])  # fmt: skip
def test_models_that_cannot_be_split_are_errors(tmp_path: Path, gpus: int, strategy: str, why: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "model: {id: Qwen/Qwen3-8B, weights: random}\ndataset: {name: synthetic, samples: 64, length: 512}\n"
    )
    with pytest.raises(SpecError, match=why):
        estimate(EstimateRequest(path, gpu="H100 SXM5", gpus=gpus, strategy=strategy))


def test_strategy_all_compares_one_to_eight_gpus(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("model: {id: Qwen/Qwen3-8B, weights: random}\nmethod: full\n"
                    "dataset: {name: synthetic, samples: 64, length: 512}\n")  # fmt: skip
    answer = estimate(EstimateRequest(path, gpu="H100 SXM5", strategy="all"))
    records = {(row["strategy"], row["gpus"]): row for row in json.loads(answer.document)["strategies"]}
    assert {count for _, count in records} == {1, 2, 4, 8}
    assert records["none", 1]["verdict"] != "fits"
    assert records["fsdp", 8]["verdict"] == "fits"
    for strategy in ("zero1", "zero2", "zero3", "fsdp", "tp", "tp+fsdp"):
        sizes = [records[strategy, count]["device"]["expected"] for count in (2, 4, 8) if (strategy, count) in records]
        assert sizes == sorted(sizes, reverse=True), strategy
    assert "experts" in records["ep", 2]["problems"][0]
    assert answer.code == 0
    figures, _, refused = answer.text.partition("\nnot supported:\n")
    assert ["zero3" in figures, "zero3" in refused] == [True, False]
    assert "ep: needs experts and Qwen/Qwen3-8B has none" in refused
    assert answer.text.startswith("Qwen/Qwen3-8B, full, batch 4 per GPU, on H100 SXM5\n")


def test_strategy_all_estimates_pipelines_with_the_batch_of_the_spec(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("model: {id: Qwen/Qwen3-8B, weights: random}\nmethod: lora\ntrain: {batch_size: 32}\n"
                    "dataset: {name: synthetic, samples: 64, length: 512}\n")  # fmt: skip
    every = json.loads(estimate(EstimateRequest(path, gpu="H200 SXM", strategy="all")).document)["strategies"]
    for row in every:
        if row["strategy"] in ("pp", "pp+ddp", "pp+fsdp", "pp+tp"):
            request = EstimateRequest(path, gpu="H200 SXM", gpus=row["gpus"], strategy=row["strategy"])
            (alone,) = json.loads(estimate(request).document)["gpus"]
            assert (row["device"], row["step_s"]) == (alone["device"], alone["time"]["step_s"]), row["strategy"]


@pytest.mark.parametrize("gpu", ["L4", "RTX 3090"])
def test_a_range_contains_the_expected_memory_on_an_almost_full_gpu(gpu: str) -> None:
    full = Experiment.model_validate({
        "name": "full", "model": {"id": "meta-llama/Llama-3.2-1B"}, "method": {"name": "full"},
        "train": {"batch_size": 8},
        "dataset": {"name": "synthetic", "samples": 64, "length": 512, "max_length": 512},
    })  # fmt: skip
    memory = estimate_memory(on_gpus(full, 2, "fsdp"), next(each for each in gpus() if each.name == gpu))
    for band in (memory.allocated, memory.reserved, memory.device):
        assert band.low <= band.expected <= band.high


def test_strategy_all_marks_measured_rows(tmp_path: Path) -> None:
    """By runs of this very step on one GPU and on two; the memory of a strategy by any run of it."""
    (path,) = (RESULTS / "two-gpus" / "round1-ddp").glob("*/spec.json")
    answer = estimate(EstimateRequest(path, gpu="H200 SXM", strategy="all", store=RESULTS))
    rows = {(row["strategy"], row["gpus"]): row for row in json.loads(answer.document)["strategies"]}
    measured = {key for key, row in rows.items() if row["basis"] == MEASURED}
    assert measured == {("none", 1), ("ddp", 2)}
    assert {key for key, row in rows.items() if row["memory_measured"]} == {*measured, ("fsdp", 2), ("zero3", 2)}
    assert "Runs confirm the memory of ddp, fsdp, zero3. Others may take 15 % more." in answer.text
    assert len(re.findall(r"\d\*", answer.text)) == 2


def test_several_machines_are_estimated_with_a_wider_range(
    tmp_path: Path,
) -> None:
    h100 = next(gpu for gpu in gpus() if gpu.name == "H100 SXM5")
    one = on_gpus(shared("zero3", 16), 16, "zero3", "params")
    two = one.model_copy(update={"launch": one.launch.model_copy(update={"nodes": 2})})
    assert estimate_memory(two, h100).host == pytest.approx(estimate_memory(one, h100).host / 2)
    near, far = (estimate_duration(each, h100) for each in (one, two))
    assert far.step_s.expected == near.step_s.expected
    assert far.step_s.high == pytest.approx(2 * near.step_s.high)
    assert "assuming that links between 2 machines are as fast as within one" in far.confidence
    assert "machines" not in near.confidence
    assert [on_gpus(two, count, "fsdp").launch.nodes for count in (1, 4, 8, 16, 32)] == [1, 1, 1, 2, 2]


@pytest.mark.usefixtures("few_ways")
def test_a_spec_for_several_machines_gets_a_fit_and_a_recommendation(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("model: {id: Qwen/Qwen3-8B, weights: random}\n"
                    "dataset: {name: synthetic, samples: 64, length: 2048}\n"
                    "train: {batch_size: 16}\nlaunch: {gpus: 4, nodes: 2, strategy: ddp}\n")  # fmt: skip
    answer = estimate(EstimateRequest(path, gpu="L40S"))
    assert answer.text.startswith("Qwen/Qwen3-8B, lora, batch 16 per GPU, on 4 GPUs of 2 machines (ddp) on L40S: ")
    found = recommend.answer(recommend.RecommendRequest(path, gpu="L40S", method="lora"))
    assert {(option.spec.launch.gpus, option.spec.launch.nodes) for option in found.options} <= {(1, 1), (2, 1), (4, 2)}
    assert found.options


def test_gpus_wait_for_an_optimizer_on_the_host(
    tmp_path: Path,
) -> None:
    l40s = next(gpu for gpu in gpus() if gpu.name == "L40S")
    here, away = (
        estimate_duration(on_gpus(shared("zero2", 2), 2, "zero2", each), l40s) for each in ("none", "optimizer")
    )
    assert "offloaded" not in here.parts
    assert away.parts["communication"] < 1.1 * here.parts["communication"]
    assert away.parts["offloaded"] > 28 * N / 1e11  # bytes of AdamW, at more than any host's memory gives
    assert away.step_s.expected - away.parts["offloaded"] <= here.step_s.expected
    assert away.watts.expected < 0.6 * here.watts.expected


def test_strategy_all_keeps_the_specs_offloading(tmp_path: Path) -> None:
    """The result equals the estimate of the spec itself."""
    path = tmp_path / "spec.yaml"
    path.write_text("model: {id: Qwen/Qwen3-8B, weights: random}\nmethod: full\n"
                    "dataset: {name: synthetic, samples: 64, length: 512}\ntrain: {batch_size: 1}\n"
                    "launch: {gpus: 3, strategy: zero2, offload: optimizer}\n")  # fmt: skip
    alone = json.loads(estimate(EstimateRequest(path, gpu="L40S")).document)["gpus"][0]
    answer = estimate(EstimateRequest(path, gpu="L40S", strategy="all"))
    rows = {(row["strategy"], row["gpus"]): row for row in json.loads(answer.document)["strategies"]}
    assert {name for (name, _), row in rows.items() if row["offload"] == "optimizer"} == {"zero1", "zero2", "zero3"}
    assert rows["zero2", 3]["verdict"] == alone["verdict"] == "fits"
    assert rows["zero2", 3]["step_s"] == alone["time"]["step_s"]
    assert "\nzero2, optimizer offloaded " in answer.text


MESH, OFFLOADED = "{gpus: 8, strategy: tp+fsdp}", "{gpus: 4, strategy: fsdp, offload: params}"


@pytest.mark.parametrize(("launch", "gpus", "strategy", "count"), [
    (MESH, None, None, 8), (OFFLOADED, 2, None, 2),
    ("{gpus: 4, nodes: 2, strategy: ddp}", 2, None, 2),
])  # fmt: skip
@pytest.mark.usefixtures("few_ways")
def test_the_command_of_the_settings_that_fit_is_valid(tmp_path: Path, launch, gpus, strategy, count) -> None:
    """For any strategy in the spec and in the options."""
    path = tmp_path / "spec.yaml"
    path.write_text("model: {id: Qwen/Qwen3-32B, weights: random}\nmethod: lora\n"
                    f"dataset: {{name: japanese-alpaca}}\ntrain: {{batch_size: 2}}\nlaunch: {launch}\n")  # fmt: skip
    answer = estimate(EstimateRequest(path, gpu="RTX 4090", gpus=gpus, strategy=strategy))
    nearest = json.loads(answer.document)["gpus"][0]["nearest"]
    assert printed_command(answer.text) == shlex.split(nearest["command"])[2:]
    words = shlex.split(nearest["command"])
    assert words[:3] == ["ftbench", "run", str(path)]
    spec = typed_spec(words[2:])
    assert spec.launch.gpus == count
    memory = estimate_memory(spec, find_gpu("RTX 4090") or 0.0)
    assert memory.verdict == "fits"


@pytest.mark.parametrize("other", [("tp+fsdp", 4), ("fsdp", 8), ("none", 1)], ids=str)
def test_a_mesh_can_become_any_launch(tmp_path: Path, other: tuple[str, int]) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("model: {id: Qwen/Qwen3-32B, weights: random}\n"
                    f"dataset: {{name: synthetic, samples: 64, length: 512}}\nlaunch: {MESH}\n")  # fmt: skip
    strategy, count = other
    asked = on_gpus(load(path), count, strategy)
    words = shlex.split(run_command(path, (), asked, gpus()[0]))[2:]
    assert typed_spec(words).launch == asked.launch


def test_waiting_for_other_gpus_is_not_host_bound() -> None:
    rtx = next(gpu for gpu in gpus() if gpu.name == "RTX 4090")
    short = {
        "dataset": {"name": "synthetic", "samples": 64, "length": 64},
        "train": {"batch_size": 1},
        "method": {"name": "lora"},
    }
    alone, several = (estimate_duration(shared(*how, **short), rtx) for how in (("none", 1), ("fsdp", 4)))
    assert alone.bound == "host"
    assert several.exposed_s > alone.step_s.expected
    assert several.bound == "GPU"


def test_communication_overlaps_with_launch_bound_steps_too() -> None:
    steps = []
    for batch in (4, 8):
        short = {"dataset": {"name": "synthetic", "samples": 64, "length": 128}, "train": {"batch_size": batch},
                 "method": {"name": "lora"}}  # fmt: skip
        spec = shared("fsdp", 4, model={"id": "Qwen/Qwen3-0.6B", "weights": "random"}, **short)
        steps.append(estimate_duration(spec, next(gpu for gpu in gpus() if gpu.name == "RTX 4090")))
    assert steps[0].bound == "host"
    assert steps[0].step_s.expected <= steps[1].step_s.expected


def test_strategy_all_uses_the_specs_gpus_and_rejects_unused_options(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "model: {id: Qwen/Qwen3-8B, weights: random}\nmethod: lora\n"
        "dataset: {name: synthetic, samples: 64, length: 512}\nlaunch: {gpus: 4, strategy: ddp}\n"
    )
    answer = estimate(EstimateRequest(path, gpu="H100 SXM5", strategy="all"))
    assert {row["gpus"] for row in json.loads(answer.document)["strategies"]} == {1, 2, 4}
    answer = estimate(EstimateRequest(path, gpu="H100 SXM5", gpus=6, strategy="all"))
    assert {row["gpus"] for row in json.loads(answer.document)["strategies"]} == {1, 2, 4, 6}
    assert "\ntp: launch.gpus: 6 GPUs cannot share the 8 key heads of Qwen/Qwen3-8B evenly" in answer.text
    with pytest.raises(SpecError, match="remove --samples and --hours"):
        estimate(EstimateRequest(path, gpu="H100 SXM5", strategy="all", samples=100, hours=4))
    with pytest.raises(SpecError, match="on one kind of GPU: name one, such as H100 SXM5"):
        estimate(EstimateRequest(path, gpu="H100 SXM5,L40S", strategy="all"))


@pytest.mark.parametrize("gpus", [5, 600])
def test_strategies_that_cannot_use_a_number_of_gpus_are_left_out(tmp_path: Path, gpus: int) -> None:
    """`pp+ddp` needs an even number of GPUs, and `pp` at most 512."""
    path = tmp_path / "spec.yaml"
    path.write_text("model: {id: tiny/qwen3, weights: random}\nmethod: lora\n")
    names = {each.strategy for each in launches(load(path), gpus)}
    assert "fsdp" in names
    assert ("pp+ddp" in names) == (gpus == 600)
    if gpus == 5:
        table = estimate(EstimateRequest(path, gpu="H100 SXM5", gpus=gpus, strategy="all")).document
        assert {row["gpus"] for row in json.loads(table)["strategies"]} == {1, 2, 4, 5}


def test_a_problem_of_many_strategies_is_listed_once(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("model: {id: tiny/qwen3, weights: random}\nmethod: lora\nobjective: dpo\n"
                    "dataset: {name: synthetic, samples: 64, length: 64}\n")  # fmt: skip
    refused = " ".join(
        estimate(EstimateRequest(path, gpu="H100 SXM5", strategy="all")).text.split("not supported:\n")[1].split()
    )
    assert "ddp, fsdp, zero1, zero2, zero3, tp, cp, pp: objective dpo supports one GPU" in refused
    assert refused.count("launch.gpus is") == 3  # 2, and for strategies of two or three parts 4 and 8
    path.write_text(path.read_text().replace("lora\nobjective: dpo", "qlora"))
    refused = estimate(EstimateRequest(path, gpu="H100 SXM5", strategy="all")).text.split("not supported:\n")[1]
    assert "fsdp, tp, tp+fsdp, cp: cannot shard 4-bit weights" in refused


def test_incompatible_specs_are_not_estimated(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("model: {id: Qwen/Qwen3-8B, weights: random}\nmethod: unsloth\n"
                    "dataset: {name: synthetic, samples: 64, length: 512}\n")  # fmt: skip
    with pytest.raises(SpecError, match="method unsloth trains on one GPU"):
        estimate(EstimateRequest(path, gpu="H100 SXM5", gpus=4, strategy="ddp"))


@pytest.mark.usefixtures("few_ways")
def test_recommend_considers_strategies_and_numbers_of_gpus(tmp_path: Path) -> None:
    """Of 32 billion parameters in 16 bits 64 GB do not fit one card of 45 GiB, unless they wait in host memory.
    The spec's own `launch` is one of the options."""
    path = tmp_path / "spec.yaml"
    path.write_text("model: {id: Qwen/Qwen3-32B, weights: random}\nmethod: lora\n"
                    "dataset: {name: synthetic, samples: 64, length: 512}\ntrain: {batch_size: 4}\n"
                    "launch: {gpus: 4, strategy: tp+fsdp}\n")  # fmt: skip
    answer = recommend.answer(recommend.RecommendRequest(path, gpu="L40S", gpus=4, method="lora"))
    assert answer.options
    for option in answer.options:
        launch, train = option.spec.launch, option.spec.train
        alone = (launch.gpus, launch.strategy) == (1, "none") and option.spec.optimizations.weight_offload
        assert alone or (launch.gpus in (2, 4) and launch.strategy not in ("none", "ddp"))
        assert train.batch_size * train.gradient_accumulation_steps * launch.data_parallel_size == 8
        assert incompatibilities(option.spec) == []


def test_a_confirmed_strategy_has_a_narrow_range() -> None:
    spec = shared("fsdp", 4)
    gpu = next(gpu for gpu in gpus() if gpu.name == "H200 SXM")
    wide = estimate_memory(spec, gpu, known=replace(constants(), strategies=()))
    alone = estimate_memory(on_gpus(spec, 1, "none"), gpu, known=constants())
    size = wide.allocated.expected
    runs = [_measured(on_gpus(spec, 1, "none"), alone.allocated.expected) for _ in range(3)]
    near, far = _measured(spec, size * 1.03), _measured(spec, size * 1.3)
    assert study.fit([*runs, near]).strategies == ("fsdp",)
    assert study.fit([*runs, near, far]).strategies == ()
    narrow = estimate_memory(spec, gpu, known=replace(constants(), strategies=("fsdp",)))
    assert narrow.allocated.high - narrow.allocated.low < 0.5 * (wide.allocated.high - wide.allocated.low)


def _measured(spec: Experiment, allocated: float) -> study.Measured:
    return study.Measured("a run", spec, "NVIDIA H200", 140.4, True, allocated, None, None, None)


def test_the_largest_batch_of_a_measured_run_is_that_of_one_gpu(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for rank, positions in enumerate((512, 640)):
        with closing(StepsWriter(run.of_rank(rank).steps)) as writer:
            writer.append([StepRow(step=1, phase="train", padded_tokens=positions, real_tokens=positions, samples=4,
                                   label_tokens=positions, longest_sequence=positions // 4)])  # fmt: skip
    batch = study.largest_batch_of(run, shared("ddp", 2))
    assert batch is not None
    assert (batch.expected.rows, batch.expected.length) == (4, 160)


def test_the_longest_sequence_gives_the_largest_pass(tmp_path: Path) -> None:
    """A pass of 2 x 100 and one of 2 x 300 are 800 positions a step; the larger one is what memory was taken by."""
    run = RunDir(tmp_path)
    with closing(StepsWriter(run.of_rank(0).steps)) as writer:
        writer.append([StepRow(step=1, phase="train", padded_tokens=800, real_tokens=700, samples=4, label_tokens=700,
                               longest_sequence=300)])  # fmt: skip
        writer.append([StepRow(step=2, phase="train", padded_tokens=1000, real_tokens=900, samples=4, label_tokens=900,
                               longest_sequence=250)])  # fmt: skip
    spec = shared("ddp", 2)
    train = spec.train.model_copy(update={"gradient_accumulation_steps": 2})
    batch = study.largest_batch_of(run, spec.model_copy(update={"train": train}))
    assert batch is not None
    assert (batch.expected.rows, batch.expected.length) == (2, 300)
