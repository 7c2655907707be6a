"""The memory a spec needs on a GPU: allocated, reserved and device, by part, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ftbench.core.hardware import MODERN, Gpu, cublas_workspace
from ftbench.core.units import GIB
from ftbench.errors import SpecError
from ftbench.estimate.memory import loss
from ftbench.estimate.memory.capacity import RESERVE, Capacity, capacity
from ftbench.estimate.memory.constants import Constants, constants
from ftbench.estimate.memory.generation import CACHE
from ftbench.estimate.memory.phases import GATHERED, MemoryCase, Parts, checkpoints_on_host, peak, phases
from ftbench.estimate.memory.share import offloaded
from ftbench.estimate.memory.weights import fetched_head, kept_by, on_host, optimizer_state, paged_state
from ftbench.estimate.workload.largest import Largest, largest
from ftbench.estimate.workload.model import check_modelled, is_rough, shape_of
from ftbench.estimate.workload.plan import plan_of
from ftbench.estimate.workload.sharding import rank_model, rank_shape, sharding_of
from ftbench.spec.experiment import Experiment, resolve

Verdict = Literal["fits", "uncertain", "does not fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "uncertain", "does not fit")

# Half-widths of the range, as shares of the expected value (errors: docs/evidence/memory-estimates.md).
ALLOCATED_SPREAD = 0.03
SHARDED_SPREAD = 0.15  # of several GPUs in a way that no run has measured; below less, as states are known exactly
SHARDED_BELOW = 0.1
ROUGH_SPREAD = 0.2  # of what `is_rough`
UNSEEN_SPREAD = 0.08  # of what no committed run has measured, or what is not quite explained: see `_spread`
MEASURED = {"gpt_oss", "llama", "llava_next", "qwen2", "qwen3", "qwen3_moe"}  # families whose memory was measured
VARYING_MOST = 0.5  # share of the activations that the pool may hold beyond the tensors where shapes vary
CONTEXT_LEAST = 0.4  # GiB: a context on a small GPU without the driver's own reserve
CONTEXT_MORE = 0.2  # GiB beyond the median of runs: kernels are loaded as they are used
NCCL, NCCL_MORE = 0.5, 1.0  # GiB outside the allocator: buffers of NCCL's channels, which grow with ranks and links
HOST = 1.9  # GiB of the host's memory that a run takes by itself: the median of 193 in results/h200, 1.6 to 2.3
POOL_LEAST = 0.025  # share of the tensors that the pool may hold beyond them in whatever run
SEGMENTS = 0.1  # GiB: what the pool's segments of 2 and 20 MiB leave unused, however small the model


@dataclass(frozen=True, slots=True)
class Band:
    """A quantity in GiB with the range in which it is expected."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """`parts` are the tensors alive at the peak, GiB by name; they add up to `allocated.expected`. `total` is what the
    GPU has as its driver counts it, and `device` counts what the driver keeps for itself, as NVML does; `usable` is
    what processes can have, of which `margin` is left free, GiB: `verdict` compares these. `host` is what the
    run takes of one host's memory, with all its GPUs. `batch` is the largest batch, rows x length, and `basis` where
    its shape comes from."""

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

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.total, self.usable, self.margin)


def estimate_memory(
    spec: Experiment,
    gpu: Gpu | float,
    *,
    config: dict[str, Any] | None = None,
    total: float | None = None,
    batch: Largest | None = None,
    known: Constants | None = None,
) -> MemoryEstimate:
    """Return the memory of one of the GPUs that `launch` asks for, the table's or one of so many GiB. `total` is what
    its driver says, GiB, where it was asked; `config` the model's config.json where facts do not know it; `batch` the
    realised largest batch of one GPU. Raises SpecError for a model whose shape is not known."""
    case, batch = _case(spec, gpu, config, batch)
    try:
        named = most = phases(case)
        if batch.most != batch.expected:
            most = phases(replace(case, batch=rank_shape(batch.most, case.sharding)))
    except ValueError as error:
        raise SpecError(str(error)) from None
    has, known = capacity(gpu, total), known or constants()
    spread = ROUGH_SPREAD if is_rough(spec) else _spread(case, known)
    allocated, reserved, device = _tiers(case, named, peak(most)[1], known, spread)
    phase, _ = peak(named)
    states = optimizer_state(*kept_by(case.model, case.plan)) if case.plan.in_backward == "offload" else 0.0
    parts = {name: part * known.allocated_factor / GIB for name, part in named[phase].items() if part > 0}
    return MemoryEstimate(
        allocated=allocated,
        reserved=reserved,
        device=device,
        peak_phase=phase,
        peak_term=max(parts, key=lambda name: parts[name]),
        total=has.total,
        usable=has.usable,
        margin=has.margin,
        verdict=verdict_of(device, has),
        host=(
            case.sharding.gpus * (HOST * GIB + on_host(case.model, case.plan) + checkpoints_on_host(case) + states)
            + offloaded(case.model, case.plan, case.sharding)
        )
        / GIB
        / spec.launch.nodes,
        parts=parts,
        phases={name: sum(of.values()) * known.allocated_factor / GIB for name, of in named.items()},
        batch=(batch.expected.rows, batch.expected.length),
        basis=batch.basis,
    )


def _case(
    spec: Experiment, gpu: Gpu | float, config: dict[str, Any] | None, batch: Largest | None
) -> tuple[MemoryCase, Largest]:
    """Return the run with the batch that is expected to be the largest, and that batch. cuBLAS keeps a workspace for
    the forward and one for the backward thread."""
    capability = (gpu.compute_capability if isinstance(gpu, Gpu) else None) or MODERN
    spec = resolve(spec, capability)
    check_modelled(spec)
    sharding = sharding_of(spec.launch)
    model = rank_model(shape_of(spec.model, config), sharding)
    batch = batch or largest(spec, model.vision)
    steady = batch.whole or spec.optimizations.fixed_shape or spec.optimizations.packing
    case = MemoryCase(
        model, plan_of(spec, model, batch.padded, batch.whole), rank_shape(batch.expected, sharding),
        spec.train.gradient_accumulation_steps > 1, sharding, 2 * cublas_workspace(capability),
        batch.padded and not steady,
    )  # fmt: skip
    return case, batch


def _tiers(case: MemoryCase, named: dict[str, Parts], most: float, known: Constants, spread: float) -> list[Band]:
    """Return what is allocated, reserved and used on the device; the largest batch that can be takes `most` bytes."""
    phase, size = peak(named)
    at_peak, highest = (each * known.allocated_factor / GIB for each in (size, most))
    below = SHARDED_BELOW if spread == SHARDED_SPREAD else spread
    allocated = Band(at_peak * (1 - below), at_peak, highest * (1 + spread))
    basis = slack_basis(case, named)
    held = sum(getattr(known, name) * amount for name, amount in basis.items())
    held += fetched_head(case.model, case.plan) / GIB  # its block is split by what comes when it is gone
    widest = 3 if case.plan.compiled else 2  # of compiled layers committed runs' pools held 0.5 to 2.4 GiB more
    beyond = max(widest * held, _not_reused(named, phase, basis), POOL_LEAST * at_peak, SEGMENTS)
    reserved = Band(allocated.low, at_peak + held, allocated.high + beyond)
    several = case.sharding.gpus > 1
    beside = known.context_gib + paged_state(*kept_by(case.model, case.plan)) / GIB + (NCCL if several else 0)
    more = CONTEXT_MORE + (NCCL_MORE if several else 0)
    device = Band(allocated.low + min(CONTEXT_LEAST, beside), reserved.expected + beside, reserved.high + beside + more)
    return [allocated, reserved, device]


def _not_reused(named: dict[str, Parts], phase: str, basis: SlackBasis) -> float:
    """Return the most, GiB, that may lie in blocks which the peak in `phase` cannot use: of batches of many shapes half
    the activations; what only the loss takes, where the peak comes elsewhere; the whole of the optimizer's temporary
    tensors, where the backward pass leaves little more room than they need. What is gathered comes in a stream of its
    own, whose blocks nothing else can use. A cache that grows with each token leaves blocks of as many sizes."""
    loss_only = named["loss"]["logits"] / GIB if phase != "loss" else 0.0
    temporary = named["optimizer step"]["one step"] / GIB if basis["optimizer_share"] else 0.0
    gathered = max(parts.get(GATHERED, 0.0) for parts in named.values()) / GIB
    grown = VARYING_MOST * max(parts.get(CACHE, 0.0) for parts in named.values()) / GIB
    return max(VARYING_MOST * basis["varying_share"], loss_only, temporary, gathered, grown)


def verdict_of(device: Band, has: Capacity) -> Verdict:
    """Return whether a process fits. The allocator gives unused blocks back before it fails, so only the tensors say
    that something does not fit. The driver's own part is in `device` as GPUs that were measured have it."""
    if device.high - RESERVE <= has.usable - has.margin:
        return "fits"
    return "does not fit" if device.low > has.usable else "uncertain"


def _spread(case: MemoryCase, known: Constants) -> float:
    """Return how far a run may lie; of several GPUs farther, where no run that the constants were fitted to tells."""
    plan = case.plan
    unsloths = plan.checkpointing == "unsloth"  # measured, and up to 6 % above what its source explains
    family = case.model.vision.family if case.model.vision else case.model.family
    unseen = plan.attention == "flash" or plan.mxfp4 or unsloths or family not in MEASURED
    unseen |= plan.streamed or bool(plan.in_backward)
    unseen |= (plan.compiled and (plan.full or plan.quantised)) or "torchao" in plan.optimizer or plan.graphed
    unseen |= plan.loss in ("pairs", "completions")  # no committed run trains them: compared with recorded peaks
    if case.sharding.gpus > 1 and case.sharding.name not in known.strategies:
        return SHARDED_SPREAD
    return UNSEEN_SPREAD if unseen else ALLOCATED_SPREAD


SlackBasis = dict[str, float]  # what each of `Constants` is a share of, GiB; of compiled graphs 1 or 0


def slack_basis(case: MemoryCase, named: dict[str, Parts]) -> SlackBasis:
    """Return the blocks that the pool cannot use twice. Those of our loss over chunks are of one size and used again;
    so is what the optimizer's step leaves, as far as it needs less than the backward pass does."""
    logits = 0.0 if case.plan.loss == "chunked" else loss.logits(case.model, case.plan, case.batch)
    transient = logits + loss.head_cast(case.model, case.plan)
    acts = named["loss"].get("activations", 0) + named["loss"].get("checkpoints", 0)
    step = named["optimizer step"]["one step"]
    ahead = max(0.0, sum(named["loss"].values()) - sum(named["optimizer step"].values()))
    alone = max(0.0, 1 - ahead / (2 * step)) if case.plan.full and step else 0.0
    return {
        "logits_share": transient / GIB, "compiled_gib": float(case.plan.compiled),
        "varying_share": acts / GIB if case.varies else 0.0, "optimizer_share": step * alone / GIB,
    }  # fmt: skip


def slack_basis_of(spec: Experiment, gpu: Gpu | float, batch: Largest | None) -> SlackBasis:
    """Return the basis of a run's slack, for fitting."""
    case, _ = _case(spec, gpu, None, batch)
    return slack_basis(case, phases(case))
