"""Estimate the allocated, reserved and device memory of a spec on a GPU, and whether the spec fits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

from ftbench.core.hardware import MODERN, Gpu, cublas_workspace
from ftbench.core.units import GIB
from ftbench.estimate.gpus import RESERVE, Capacity, capacity
from ftbench.estimate.memory import ends
from ftbench.estimate.memory.longer import longer_batches
from ftbench.estimate.memory.phases import GATHERED, MemoryCase, Parts, checkpoints_on_host, peak, phases
from ftbench.estimate.memory.share import free_in_other_streams, offloaded
from ftbench.estimate.memory.weights import kept_by, on_host, optimizer_state, paged_state
from ftbench.estimate.workload.largest import BatchShape, Largest, largest
from ftbench.estimate.workload.model import check_modelled, is_rough, shape_of
from ftbench.estimate.workload.plan import plan_of
from ftbench.estimate.workload.sharding import rank_model, rank_shape, sharding_of
from ftbench.facts import read_facts
from ftbench.spec.experiment import Experiment, resolve

Verdict = Literal["fits", "uncertain", "does not fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "uncertain", "does not fit")

# Half-widths of the range, as shares of the expected value, for cases without committed runs. For other cases the range
# was fitted to runs (docs/evidence/memory-estimates.md).
SHARDED_SPREAD = 0.15  # upper half of the range, for strategies without a measured run
SHARDED_BELOW = 0.1  # lower half of this range
ROUGH_SPREAD = 0.2  # for specs with large errors (`is_rough`)
UNSEEN_SPREAD = 0.055  # for settings without a committed run, or not fully understood (see `_spread`)
MEASURED = {"gpt_oss", "llama", "llava_next", "qwen2", "qwen3", "qwen3_moe"}  # families whose memory was measured
GRAPH_POOL = 0.025  # measured: with a CUDA graph, the pool was larger by 0 to 0.035 of the tensors
VARYING_MOST, VARYING_IMAGES = 0.5, 1.6  # pool / activations at most, if shapes vary (second: images, unknown order)
CONTEXT_LEAST = 0.4  # GiB of a CUDA context on a small GPU, without the memory that the driver reserves for itself
CONTEXT_MORE = 0.2  # GiB by which a context may exceed the median of the runs, because kernels are loaded on first use
# GiB of NCCL's buffers outside the allocator, and GiB that may be added. Two H100 and two H200 had 0.8 (ddp), 0.9 to
# 1.3 (fsdp, zero3) and 2.0 (pp): device memory minus reserved memory, above that of one GPU (results/*/two-gpus).
NCCL, NCCL_MORE = 0.9, 1.0
HOST = 1.9  # GiB of host memory of a run without offloading: the median of 193 runs in results/h200 (1.6 to 2.3)
POOL_LEAST = 0.025  # in every run, the pool may be larger than the tensors by this share
STREAMED = 0.2  # GiB that stay unused with weight_offload: 0.1 to 0.4 in results/h200/records since 2026-11-28T1711
SEGMENTS = 0.1  # GiB that stay unused in the pool's segments of 2 and 20 MiB, even with small models


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of `facts/estimator.yaml`, fitted to measured runs.

    `allocated_factor` multiplies the sum of all tensors. `context_gib` is the memory of driver and CUDA context. The
    unused part of the allocator's pool is a sum: `logits_share` * logits, `compiled_share` * tensors of a compiled
    layer, `varying_share` * activations if batch shapes vary, and `optimizer_share` * temporary tensors of the
    optimizer. For 90 % of the fitted runs, the errors are within two limits: `allocated_range` times the allocated
    memory, and `pool_range` times the distance from the expected pool to the smallest or largest possible pool. `runs`
    are the fitted runs. `strategies` are the multi-GPU strategies for which measured runs agree with the estimate."""

    allocated_factor: float
    context_gib: float
    logits_share: float
    compiled_share: float
    varying_share: float
    optimizer_share: float
    allocated_range: float
    pool_range: float
    runs: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()


FITTED = tuple(field.name for field in fields(Constants) if field.name not in ("runs", "strategies"))


@cache
def constants() -> Constants:
    """Return the constants of `facts/estimator.yaml`."""
    values: dict[str, Any] = read_facts("estimator.yaml")
    lists: dict[str, Any] = {name: tuple(values.get(name, ())) for name in ("runs", "strategies")}
    return Constants(**lists | {name: float(values[name]) for name in FITTED})


@dataclass(frozen=True, slots=True)
class Band:
    """An expected value with the low and the high end of its range, in GiB or another unit."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The estimated memory of one GPU in GiB.

    `parts` are the tensor sizes at the memory peak by name. The sum of `parts` is `allocated.expected`. `device` is the
    memory that NVML reports, which includes driver memory. `total`, `usable` and `margin` are the fields of `Capacity`.
    `host` is the host memory of the run. `batch` is the shape `(rows, length)` of the largest batch, and `basis` is the
    source of this shape. `stages` is the device memory of each pipeline rank."""

    allocated: Band
    reserved: Band
    device: Band
    peak_phase: str
    peak_term: str
    total: float
    usable: float
    margin: float
    verdict: Verdict
    host: float = HOST
    parts: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    batch: tuple[int, int] = (1, 1)
    basis: str = ""
    stages: tuple[float, ...] = ()

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.total, self.usable, self.margin)


def estimate_memory(
    spec: Experiment, gpu: Gpu | float, *, total: float | None = None, batch: Largest | None = None,
    known: Constants | None = None, rank: int | None = None,
) -> MemoryEstimate:  # fmt: skip
    """Return the estimated memory of one GPU. With pipeline parallelism, this is the GPU with the most memory.

    Args:
        gpu: A GPU of the table, or the memory of a GPU in GiB.
        total: The GPU memory in GiB that the driver reports, if known.
        batch: The largest batch of a run on one GPU. The default is predicted from the spec.
        known: The fitted constants. The default is `facts/estimator.yaml`.
        rank: The pipeline rank to estimate. The default is the rank with the most memory.

    Raises:
        SpecError: The shape of the model is not known."""
    if spec.launch.pp and rank is None:
        more: dict[str, Any] = {"total": total, "batch": batch, "known": known}
        stages = [estimate_memory(spec, gpu, **more, rank=at) for at in range(spec.launch.pp)]
        heaviest = max(stages, key=lambda stage: stage.device.expected)
        return replace(heaviest, stages=tuple(stage.device.expected for stage in stages))
    case, batch = case_of(spec, gpu, batch, rank)
    named = phases(case)
    least, most = (_peak_of(case, named, batch, end) for end in (batch.least, batch.most))
    has, known = capacity(gpu, total), known or constants()
    spread = ROUGH_SPREAD if is_rough(spec) else _spread(case, known)
    allocated, reserved, device = _tiers(case, named, (least, most), known, spread, has)
    phase, _ = peak(named)
    parts = {name: part * known.allocated_factor / GIB for name, part in named[phase].items() if part > 0}
    return MemoryEstimate(
        allocated, reserved, device,
        peak_phase=phase,
        peak_term=max(parts, key=lambda name: parts[name]),
        total=has.total, usable=has.usable, margin=has.margin,
        verdict=verdict_of(allocated, device, has),
        host=_host(case) / spec.launch.nodes,
        parts=parts,
        phases={name: sum(of.values()) * known.allocated_factor / GIB for name, of in named.items()},
        batch=(batch.expected.rows, batch.expected.length),
        basis=batch.basis,
    )  # fmt: skip


def _peak_of(case: MemoryCase, named: dict[str, Parts], batch: Largest, end: BatchShape | None) -> float:
    """Return the peak bytes with the batch shape `end`. If `end` is None, return the peak with the expected batch.

    `named` is the result of `phases` with the expected batch."""
    if end is None or end == batch.expected:
        return peak(named)[1]
    return peak(phases(replace(case, batch=rank_shape(end, case.sharding))))[1]


def _host(case: MemoryCase) -> float:
    """Return the host memory of a run in GiB, summed over the processes of all GPUs."""
    states = optimizer_state(*kept_by(case.model, case.plan)) if case.plan.in_backward == "offload" else 0.0
    each = HOST * GIB + on_host(case.model, case.plan) + checkpoints_on_host(case) + states
    return (case.sharding.gpus * each + offloaded(case.model, case.plan, case.sharding)) / GIB


def case_of(
    spec: Experiment, gpu: Gpu | float, batch: Largest | None, rank: int | None = None
) -> tuple[MemoryCase, Largest]:
    """Return the inputs of the memory formulas, and the largest batch of the run.

    The workspace counts twice, because cuBLAS keeps one for the forward thread and one for the backward thread."""
    capability = (gpu.compute_capability if isinstance(gpu, Gpu) else None) or MODERN
    spec = resolve(spec, capability)
    check_modelled(spec)
    sharding = replace(sharding_of(spec.launch), rank=rank)
    model = rank_model(shape_of(spec.model), sharding)
    batch = batch or largest(spec, model.vision)
    steady = batch.whole or spec.optimizations.fixed_shape or spec.optimizations.packing
    plan = plan_of(spec, model, batch.padded, batch.whole)
    ordered = plan.checkpointing == "full" and sharding.gpus == 1 and not steady
    case = MemoryCase(
        model, plan, rank_shape(batch.expected, sharding),
        spec.train.gradient_accumulation_steps > 1, sharding, 2 * cublas_workspace(capability),
        (batch.padded or batch.unequal) and not steady, batch.records if ordered else (),
    )  # fmt: skip
    return case, batch


def _tiers(
    case: MemoryCase, named: dict[str, Parts], ends: tuple[float, float], known: Constants, spread: float, has: Capacity
) -> list[Band]:
    """Return the allocated, reserved and device memory in GiB, with their ranges.

    `ends` are the peak bytes with the smallest likely batch and with the largest possible batch. Free blocks of other
    CUDA streams and of shorter batches count only while memory is left: the allocator frees them on a full GPU."""
    phase, size = peak(named)
    lowest, at_peak, highest = (each * known.allocated_factor / GIB for each in (ends[0], size, ends[1]))
    below = SHARDED_BELOW if spread == SHARDED_SPREAD else spread
    allocated = Band(lowest * (1 - below), at_peak, highest * (1 + spread))
    basis = slack_basis(case, named)
    held = sum(getattr(known, name) * amount for name, amount in basis.items())
    held += STREAMED * case.plan.streamed + GRAPH_POOL * at_peak * case.plan.graphed
    widest = 3 if case.plan.compiled else 2  # measured: pools with compiled layers were 0.5 to 2.4 GiB larger
    left, share = _not_reused(case, named, phase, basis), known.pool_range
    beyond = max(widest * held, left, POOL_LEAST * at_peak, SEGMENTS)
    reserved = Band(
        allocated.low + held * (1 - share), at_peak + held, allocated.high + held + share * max(0.0, beyond - held)
    )
    several = case.sharding.gpus > 1
    outside = known.context_gib + paged_state(*kept_by(case.model, case.plan)) / GIB + (NCCL if several else 0)
    more = CONTEXT_MORE + (NCCL_MORE if several else 0)
    device = Band(
        reserved.low + min(outside, CONTEXT_LEAST), reserved.expected + outside, reserved.high + outside + share * more,
    )  # fmt: skip
    apart = free_in_other_streams(case.model, case.plan, case.sharding, named[phase].get("gradients", 0.0)) / GIB
    apart += longer_batches(case, basis["varying_share"] * (1 + known.varying_share))
    expected, high = (max(0.0, min(apart, has.total - has.margin - end)) for end in (device.expected, device.high))
    tiers = ((each.low, each.expected + expected, each.high + high) for each in (reserved, device))
    return [allocated, *(Band(low, middle, max(middle, top)) for low, middle, top in tiers)]


def _not_reused(case: MemoryCase, named: dict[str, Parts], phase: str, basis: SlackBasis) -> float:
    """Return an upper bound in GiB of the allocator's free blocks that tensors of the peak `phase` cannot reuse.

    The bound is the largest of four sizes: some of the activations (if batch shapes vary), the logits (if the peak is
    not in the loss), the optimizer's temporary tensors (if the backward pass frees too few blocks), and gathered
    weights. Gathered weights use a separate CUDA stream, so other tensors cannot use their blocks."""
    loss_only = named["loss"]["logits"] / GIB if phase != "loss" else 0.0
    temporary = named["optimizer step"]["one step"] / GIB if basis["optimizer_share"] else 0.0
    gathered = max(parts.get(GATHERED, 0.0) for parts in named.values()) / GIB
    most = VARYING_IMAGES if case.batch.images.patches and not case.records else VARYING_MOST
    return max(most * basis["varying_share"], loss_only, temporary, gathered)


def verdict_of(allocated: Band, device: Band, has: Capacity) -> Verdict:
    """Return the verdict for a run on a GPU: `fits`, `does not fit` or `uncertain`.

    torch's allocator frees its unused blocks before an out-of-memory error. Therefore the verdict is `does not fit`
    only if the tensors and the CUDA context need more memory than the GPU has."""
    if device.high - RESERVE <= has.usable - has.margin:
        return "fits"
    return "does not fit" if allocated.low + CONTEXT_LEAST > has.usable else "uncertain"


def _spread(case: MemoryCase, known: Constants) -> float:
    """Return the half-width of the range as a share of the expected value: more for settings without committed runs."""
    plan = case.plan
    unsloths = plan.checkpointing == "unsloth"  # measured up to 6 % above the formula
    family = case.model.vision.family if case.model.vision else case.model.family
    unseen = plan.attention == "flash" or plan.mxfp4 or unsloths or family not in MEASURED
    unseen |= plan.streamed or bool(plan.in_backward)
    unseen |= (plan.compiled and (plan.full or plan.quantised)) or "torchao" in plan.optimizer
    unseen |= plan.loss == "pairs"  # no committed run trains pairs
    if case.sharding.gpus > 1 and case.sharding.name not in known.strategies:
        return SHARDED_SPREAD
    return UNSEEN_SPREAD if unseen else known.allocated_range


SlackBasis = dict[str, float]  # name of a constant to the GiB that it multiplies


def slack_basis(case: MemoryCase, named: dict[str, Parts]) -> SlackBasis:
    """Return {constant name: GiB} for tensors that may leave unused blocks in the allocator's pool.

    The logits of ftbench's chunked loss do not count, because all chunks reuse the same blocks. The cast of the head
    does not count if it is part of the peak (in the loss), or if batch shapes vary, because activations then use its
    block. A compiled layer counts with its temporary and its saved tensors, unless `longer_batches` counts them. The
    optimizer's temporary tensors first reuse free blocks of the backward pass, so only those in new blocks count."""
    logits = 0.0 if case.plan.loss == "chunked" else ends.logits(case.model, case.plan, case.batch)
    reused = case.varies or peak(named)[0] == "loss"
    transient = logits + (0.0 if reused else ends.head_cast(case.model, case.plan))
    kinds = ("activations", "checkpoints", *(["one layer"] if case.model.vision else []))  # see founding-images.md
    acts = max(sum(parts.get(kind, 0) for kind in kinds) for parts in named.values())
    saved = max(parts.get("activations", 0) + parts.get("checkpoints", 0) for parts in named.values())
    layer = saved / len(case.model.layers) + max(parts.get("one layer", 0) for parts in named.values())
    step = named["optimizer step"]["one step"]
    ahead = max(0.0, sum(named["loss"].values()) - sum(named["optimizer step"].values()))
    unshared = max(0.0, 1 - ahead / (2 * step)) if case.plan.full and step else 0.0
    return {
        "logits_share": transient / GIB, "compiled_share": layer / GIB * (case.plan.compiled and not case.records),
        "varying_share": acts / GIB if case.varies else 0.0, "optimizer_share": step * unshared / GIB,
    }  # fmt: skip
