"""The memory a spec needs on a GPU: allocated, reserved and device, by part, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ftbench.core.hardware import MODERN, Gpu, cublas_workspace
from ftbench.core.units import GIB
from ftbench.errors import SpecError
from ftbench.estimate.memory import loss
from ftbench.estimate.memory.capacity import RESERVE, Capacity, capacity
from ftbench.estimate.memory.constants import Constants, constants
from ftbench.estimate.memory.phases import MemoryPlan, checkpoints_on_host, peak, phases
from ftbench.estimate.memory.weights import kept_by, on_host, optimizer_state, paged_state
from ftbench.estimate.workload import batches
from ftbench.estimate.workload.division import division_of, rank_model, rank_shape
from ftbench.estimate.workload.method import recipe_of
from ftbench.estimate.workload.model import check_modelled, is_rough, shape_of
from ftbench.spec.experiment import Experiment, resolve

Verdict = Literal["fits", "uncertain", "does not fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "uncertain", "does not fit")
MOST_BATCH = 65_536  # spec.experiment.Train.batch_size

# How far from the expected value a run may lie: shares of it, wider than the errors in docs/estimates.md.
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
    run takes of the host's memory. `batch` is the largest batch in positions, rows x length, and `basis` where its
    shape comes from."""

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
    batch: batches.Largest | None = None,
    known: Constants | None = None,
) -> MemoryEstimate:
    """Return the memory of one of the GPUs that `launch` asks for, the table's or one of so many GiB. `total` is what
    its driver says, GiB, where it was asked; `config` the model's config.json where facts do not know it; `batch` the
    realised largest batch of one GPU. Raises SpecError for a model whose shape is not known."""
    expected, most, largest, varies = _plans(spec, gpu, config, batch)
    try:
        named = phases(expected)
        highest = named if most is expected else phases(most)
    except ValueError as error:
        raise SpecError(str(error)) from None
    known = known or constants()
    spread = ROUGH_SPREAD if is_rough(spec) else _spread(expected, known)
    return _estimate(expected, named, highest, capacity(gpu, total), known, largest, varies, spread)


def _plans(
    spec: Experiment, gpu: Gpu | float, config: dict[str, Any] | None, batch: batches.Largest | None
) -> tuple[MemoryPlan, MemoryPlan, batches.Largest, bool]:
    """Return the run with the batch that is expected to be the largest and with the largest that can be, both, and
    whether batches differ in shape, so that the pool holds blocks of many sizes. cuBLAS keeps a workspace for the
    forward and one for the backward thread."""
    capability = (gpu.compute_capability if isinstance(gpu, Gpu) else None) or MODERN
    spec = resolve(spec, capability)
    check_modelled(spec)
    division = division_of(spec.launch)
    model = rank_model(shape_of(spec.model, config), division)
    largest = batch or batches.largest(spec, model.vision)
    plan = MemoryPlan(
        model, recipe_of(spec, model, largest.padded, largest.whole), rank_shape(largest.expected, division),
        spec.train.gradient_accumulation_steps > 1, division, 2 * cublas_workspace(capability),
    )  # fmt: skip
    steady = largest.whole or spec.optimizations.fixed_shape or spec.optimizations.packing
    most = plan if largest.most == largest.expected else replace(plan, batch=rank_shape(largest.most, division))
    return plan, most, largest, largest.padded and not steady


def _estimate(
    plan: MemoryPlan,
    named: dict[str, dict[str, float]],
    most: dict[str, dict[str, float]],
    has: Capacity,
    known: Constants,
    largest: batches.Largest,
    varies: bool,
    spread: float,
) -> MemoryEstimate:
    phase, size = peak(named)
    parts = {name: part * known.allocated_factor / GIB for name, part in named[phase].items() if part > 0}
    at_peak = size * known.allocated_factor / GIB
    highest = peak(most)[1] * known.allocated_factor / GIB
    below = SHARDED_BELOW if spread == SHARDED_SPREAD else spread
    allocated = Band(at_peak * (1 - below), at_peak, highest * (1 + spread))
    basis = slack_basis(plan, named, varies)
    held = slack(basis, known)
    widest = 3 if basis.compiled else 2  # of compiled layers committed runs' pools held 0.5 to 2.4 GiB more
    beyond = max(widest * held, _not_reused(named, phase, basis, varies), 0.02 * at_peak, SEGMENTS)
    reserved = Band(allocated.low, at_peak + held, allocated.high + beyond)
    several = plan.division.gpus > 1
    beside = known.context_gib + paged_state(*kept_by(plan.model, plan.recipe)) / GIB + (NCCL if several else 0)
    more = CONTEXT_MORE + (NCCL_MORE if several else 0)
    device = Band(allocated.low + min(CONTEXT_LEAST, beside), reserved.expected + beside, reserved.high + beside + more)
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
        host=HOST + (on_host(plan.model, plan.recipe) + checkpoints_on_host(plan) + _states_on_host(plan)) / GIB,
        parts=parts,
        phases={name: sum(of.values()) * known.allocated_factor / GIB for name, of in named.items()},
        batch=(largest.expected.rows, largest.expected.length),
        basis=largest.basis,
    )


def _states_on_host(plan: MemoryPlan) -> float:
    return optimizer_state(*kept_by(plan.model, plan.recipe)) if plan.recipe.in_backward == "offload" else 0.0


def _not_reused(named: dict[str, dict[str, float]], phase: str, basis: SlackBasis, varies: bool) -> float:
    """Return the most, GiB, that may lie in blocks which the peak in `phase` cannot use: of batches of many shapes half
    the activations; what only the loss takes, where the peak comes elsewhere; the whole of the optimizer's temporary
    tensors, where the backward pass leaves little more room than they need."""
    acts = sum(named["loss"][name] for name in ("activations", "checkpoints"))
    blocks = (
        VARYING_MOST * acts if varies else 0.0,
        named["loss"]["logits"] if phase != "loss" else 0.0,
        named["optimizer step"]["one step"] if basis.optimizer else 0.0,
    )
    return max(blocks) / GIB


def verdict_of(device: Band, has: Capacity) -> Verdict:
    """Return whether a process fits. The allocator gives unused blocks back before it fails, so only the tensors say
    that something does not fit. The driver's own part is in `device` as GPUs that were measured have it."""
    if device.high - RESERVE <= has.usable - has.margin:
        return "fits"
    return "does not fit" if device.low > has.usable else "uncertain"


def _spread(plan: MemoryPlan, known: Constants) -> float:
    """Return how far a run may lie; of several GPUs farther, where no run that the constants were fitted to tells."""
    recipe = plan.recipe
    unsloths = recipe.checkpointing == "unsloth"  # measured, and up to 6 % above what its source explains
    family = plan.model.vision.family if plan.model.vision else plan.model.family
    unseen = recipe.attention == "flash" or recipe.mxfp4 or unsloths or family not in MEASURED
    unseen |= recipe.streamed or bool(recipe.in_backward)
    unseen |= (recipe.compiled and (recipe.full or recipe.quantised)) or "torchao" in recipe.optimizer or recipe.graphed
    unseen |= recipe.loss == "pairs"  # no committed run trains them: held against simulations
    if plan.division.gpus > 1 and plan.division.name not in known.strategies:
        return SHARDED_SPREAD
    return UNSEEN_SPREAD if unseen else ALLOCATED_SPREAD


@dataclass(frozen=True, slots=True)
class SlackBasis:
    """What the pool's slack is a share of, GiB: see `Constants`. `compiled` is 1 or 0."""

    logits: float
    compiled: float
    varying: float
    optimizer: float


def slack_basis(plan: MemoryPlan, named: dict[str, dict[str, float]], varies: bool) -> SlackBasis:
    """Return the blocks that the pool cannot use twice. Those of our loss over chunks are all of one size and are
    used again; so is what the optimizer's step leaves in the pool, as far as it needs less than the backward pass
    does."""
    logits = 0.0 if plan.recipe.loss == "chunked" else loss.logits(plan.model, plan.recipe, plan.batch)
    transient = logits + loss.head_cast(plan.model, plan.recipe)
    acts = named["loss"].get("activations", 0) + named["loss"].get("checkpoints", 0)
    step = named["optimizer step"]["one step"]
    ahead = max(0.0, sum(named["loss"].values()) - sum(named["optimizer step"].values()))
    alone = max(0.0, 1 - ahead / (2 * step)) if plan.recipe.full and step else 0.0
    return SlackBasis(transient / GIB, float(plan.recipe.compiled), acts / GIB if varies else 0.0, step * alone / GIB)


def slack_basis_of(spec: Experiment, gpu: Gpu | float, batch: batches.Largest | None) -> SlackBasis:
    """Return the basis of a run's slack, for fitting."""
    plan, _, _, varies = _plans(spec, gpu, None, batch)
    return slack_basis(plan, phases(plan), varies)


def slack(basis: SlackBasis, known: Constants) -> float:
    """Return the GiB that the allocator's pool holds beyond the tensors at their peak."""
    shares = (known.logits_share, known.compiled_gib, known.varying_share, known.optimizer_share)
    amounts = (basis.logits, basis.compiled, basis.varying, basis.optimizer)
    return sum(share * amount for share, amount in zip(shares, amounts, strict=True))


def largest_batch(spec: Experiment, gpu: Gpu | float, *, likely: bool = False, **options: Any) -> int | None:
    """Return the largest train.batch_size whose verdict is `fits`, at most the samples that there are; None where
    not even one does. With `likely` the largest that is expected to fit, with no margin: where a search may start.
    `options` are those of `estimate_memory`."""
    has = capacity(gpu, options.get("total"))

    def needed(size: int) -> float:
        trial = spec.model_copy(update={"train": spec.train.model_copy(update={"batch_size": size})})
        device = estimate_memory(trial, gpu, **options).device
        return device.expected if likely else device.high

    return largest_within(spec, needed, has.usable - (0 if likely else has.margin) + RESERVE, {})


def largest_within(
    spec: Experiment, needed: Callable[[int], float], room: float, known: Mapping[int, float]
) -> int | None:
    """Return the largest batch that needs no more than `room`, in few steps: memory is nearly a straight line over the
    batch size. `known` is what some sizes need."""
    most = min(MOST_BATCH, spec.dataset.samples or MOST_BATCH)
    known = {1: needed(1)} | {size: need for size, need in known.items() if size <= most}
    if known[1] > room:
        return None
    fits = max(size for size, need in known.items() if need <= room)
    fails = min((size for size, need in known.items() if need > room), default=most + 1)
    while fails - fits > 1:
        size = _between(fits, fails, known, room)
        known[size] = needed(size)
        fits, fails = (size, fails) if known[size] <= room else (fits, size)
    return fits


def _between(fits: int, fails: int, known: Mapping[int, float], room: float) -> int:
    """Return the next size to try: where the line through the two nearest sizes meets `room`, else twice or half
    way."""
    other = fails if fails in known else max((size for size in known if size < fits), default=None)
    if other is None:
        return min(2 * fits, fails - 1)
    slope = (known[other] - known[fits]) / (other - fits)
    if slope <= 0:
        return (fits + fails) // 2
    step = max(1, int((room - known[fits]) / slope))
    return max(fits + 1, min(fits + step + (fails not in known), fails - 1))
