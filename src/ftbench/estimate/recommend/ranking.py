"""Estimate all training variants of a spec, and rank the variants within the limits for time, cost and GPU memory."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from ftbench.core.hardware import Gpu, capability_of
from ftbench.core.stats import grouped_by
from ftbench.errors import SpecError
from ftbench.estimate.memory.estimate import Band, MemoryEstimate
from ftbench.estimate.memory.largest_batch import MemoryCache, with_batch
from ftbench.estimate.recommend.candidates import ADAPTERS, Candidate, launches, variants
from ftbench.estimate.time.duration import DurationEstimate, estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.time.rates import limits_of
from ftbench.estimate.workload.batches import batches_of, epochs_samples, per_step
from ftbench.estimate.workload.sharding import on_gpus, shared_how
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.incompatibilities import incompatibilities, machine_incompatibilities
from ftbench.spec.prices import Amount, Prices, amount

Objective = Literal["speed", "cost", "energy", "memory"]
PACKED = 1 / 3  # with packing, the samples per step may differ by this share: 2 or more rows are always near enough


@dataclass(frozen=True, slots=True)
class Goal:
    """The task of `ftbench recommend`: the number of `samples` to train, the limits, and the quantity to optimize.

    `deadline_s` (seconds) and `max_cost` (currency of the prices) are optional limits. `counts` are the allowed numbers
    of GPUs. Each step trains `effective_batch` samples, with gradient accumulation if necessary. If `effective_batch`
    is None, any number is allowed."""

    spec: Experiment
    gpus: tuple[Gpu, ...]
    samples: float
    deadline_s: float | None = None
    max_cost: float | None = None
    prices: Prices | None = None
    counts: tuple[int, ...] = (1,)
    objective: Objective = "speed"
    methods: tuple[str, ...] = ()
    effective_batch: int | None = None
    history: RunHistory = field(default_factory=RunHistory)


@dataclass(frozen=True, slots=True)
class Option:
    """A variant with a batch size on a GPU, and its estimates. Without a price for the GPU, `cost` is None."""

    spec: Experiment
    gpu: Gpu
    duration: DurationEstimate
    memory: MemoryEstimate
    seconds: Band
    joules: Band
    cost: Amount | None

    @property
    def location(self) -> str:
        """GPUs and strategy as text: `H200 SXM`, `4 x H200 SXM (fsdp)`, `4 x H200 SXM (fsdp, params offloaded)`."""
        return _location(self.spec, self.gpu)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The answer of `ftbench recommend`.

    `options` are the variants within all limits, best first. Variants that may miss the deadline come last. If
    `options` is empty, `closest` is the variant that exceeds a limit by the smallest factor, and `missed` names this
    limit. `ruled_out` counts the rejected variants by reason, and `considered` counts all variants. `lengths` has
    pairs: a factor for the mean sample length, and the best variant with this length."""

    goal: Goal
    options: tuple[Option, ...]
    closest: Option | None
    missed: str
    ruled_out: dict[str, int]
    considered: int
    lengths: tuple[tuple[float, Option | None], ...] = ()

    def best_per_gpu(self) -> list[Option]:
        """Return the best variant for each GPU, best first."""
        return [group[0] for group in grouped_by(self.options, lambda option: option.gpu.name).values()]


def recommend(goal: Goal, memory_cache: MemoryCache | None = None) -> Recommendation:
    """Return the ranked variants for a goal. Raise SpecError for an unknown model, or if no GPU has a known speed."""
    unrated = dict[Gpu, str]()  # GPU → why its speed in the spec's precision is not known
    for gpu in goal.gpus:
        try:
            limits_of(gpu, resolve(goal.spec, capability_of(gpu)).train.precision, False, goal.history.path)
        except SpecError as error:
            unrated[gpu] = str(error)
    if len(unrated) == len(goal.gpus):
        raise SpecError(*unrated.values())
    methods = goal.methods or (("full",) if goal.spec.method.name == "full" else ADAPTERS)
    equal = len(set(goal.history.lengths(goal.spec).values)) == 1
    memory_cache, reasons = memory_cache or MemoryCache(), Counter[str]()
    tried = dict[tuple[object, ...], Option | str]()
    shared = [launch for count in goal.counts for launch in launches(goal.spec, count)]
    singles = variants(on_gpus(goal.spec, 1, "none"), methods, equal)
    for variant in (single.on(launch) for single in singles for launch in shared):
        for gpu in goal.gpus:
            on = resolve(with_batch(variant.spec, 1, 1), capability_of(gpu))
            key = (gpu.name, on.method, on.optimizations, on.train, on.launch)
            if key not in tried:  # otherwise the variant equals an earlier one after `auto` was resolved
                tried[key] = _refused(variant, gpu, unrated) or _best_batch(variant, on, gpu, goal, memory_cache)
    reasons.update(outcome for outcome in tried.values() if isinstance(outcome, str))
    fitting = [outcome for outcome in tried.values() if isinstance(outcome, Option)]
    reasons.update(limit[0] for option in fitting if (limit := _missed(option, goal)))
    kept = sorted((option for option in fitting if not _missed(option, goal)), key=lambda each: rank(each, goal))
    closest, missed = _closest(fitting, goal) if fitting and not kept else (None, "")
    return Recommendation(goal, tuple(kept), closest, missed, dict(reasons.most_common()), len(tried))


def _refused(variant: Candidate, gpu: Gpu, unrated: Mapping[Gpu, str]) -> str | None:
    if variant.problems:
        return f"cannot work: {variant.problems[0]}"
    if problems := machine_incompatibilities(variant.spec, capability_of(gpu)):
        return f"not on {gpu.name}: {problems[0]}"
    return f"not on {gpu.name}: {unrated[gpu]}" if gpu in unrated else None


def _best_batch(variant: Candidate, resolved: Experiment, gpu: Gpu, goal: Goal, cache: MemoryCache) -> Option | str:
    """Return the option with the best batch size, or the reason why no size works. `resolved` has batch size 1."""
    effective = _rows_per_step(resolved, goal)
    if effective == 0:
        if not variant.spec.optimizations.packing:
            return f"the samples per step are not divisible by {variant.spec.launch.gpus} GPUs (--effective-batch)"
        return "packed rows cannot hold this number of samples per step (--effective-batch)"
    in_one_pass = resolved.optimizations.optimizer_in_backward  # cannot accumulate gradients
    smallest = with_batch(resolved, 1, 2 if (effective or 1) > 1 and not in_one_pass else 1)
    sizes = _fitting_batches(smallest, gpu, effective, goal, cache)
    if not sizes:
        uncertain = cache.estimate(smallest, gpu).verdict == "uncertain"
        return f"{'may not' if uncertain else 'does not'} fit at batch 1 on {_location(variant.spec, gpu)}"
    sizes = sizes[:1] if in_one_pass and effective else sizes
    sizes = sizes if goal.objective == "memory" else sizes[:2]  # a larger batch is rarely slower
    if in_one_pass and effective and sizes[0] != effective:
        return f"cannot train {effective} samples in one batch or accumulate gradients: lower --effective-batch"
    pairs = [(size, effective // size if effective else 1) for size in sizes]
    if refused := incompatibilities(resolve(with_batch(variant.spec, *pairs[0]), capability_of(gpu))):
        return f"cannot work: {refused[0]}"  # for example a CUDA graph with gradient accumulation
    tried = [resolve(with_batch(variant.spec, *pair), capability_of(gpu)) for pair in pairs]  # sets CUDA graphs
    options = [_option(each, gpu, goal, cache) for each in tried]
    within = [option for option in options if not _missed(option, goal)]
    best = min(within or options, key=lambda option: rank(option, goal))
    train = best.spec.train
    return replace(best, spec=with_batch(variant.spec, train.batch_size, train.gradient_accumulation_steps))


def _fitting_batches(
    smallest: Experiment, gpu: Gpu, effective: int | None, goal: Goal, memory_cache: MemoryCache
) -> list[int]:
    """Return the batch sizes that fit a GPU, largest first.

    `effective` is the number of rows per step on each data-parallel rank. Each returned size divides `effective`. If
    `effective` is None, return the largest batch size that fits, and all smaller powers of two."""
    most = max(1, math.ceil(goal.samples / smallest.launch.data_parallel_size))  # at least one step has a full batch
    unit = smallest.launch.micro_batches or 1
    if effective is None:
        largest = memory_cache.largest_batch(smallest, gpu, most=most) or 0
        sizes = {largest, *(2**power for power in range(largest.bit_length()))}
        return sorted((size for size in sizes if size and size % unit == 0), reverse=True)
    most = min(most, effective, smallest.dataset.samples or most)
    divisors = [size for size in range(unit, most + 1, unit) if effective % size == 0]

    def fails(size: int) -> bool:
        return memory_cache.estimate(with_batch(smallest, size), gpu).verdict != "fits"

    return divisors[: bisect_left(divisors, True, key=fails)][::-1]


def samples_per_step(spec: Experiment, history: RunHistory) -> float:
    """Return the mean number of samples per step of a spec, over all GPUs."""
    return spec.launch.data_parallel_size * per_step(spec, batches_of(spec, history.lengths(spec)), "samples")


def alternative(spec: Experiment, gpu: Gpu, history: RunHistory) -> Option | None:
    """Return the fastest variant that fits a GPU with the samples per step of `spec`. Return None if nothing fits.

    If `spec` has another method than the default (lora), other methods are tried only if this method does not fit."""
    samples = max(1, round(samples_per_step(spec, history)))
    goal = Goal(spec, (gpu,), 1000 * samples, counts=(spec.launch.gpus,), effective_batch=samples, history=history)
    with suppress(SpecError):  # the GPU's speed is not known
        own = recommend(replace(goal, methods=(spec.method.name,))).options if spec.method.name != "lora" else ()
        return next(iter(own or recommend(goal).options), None)
    return None


def _rows_per_step(smallest: Experiment, goal: Goal) -> int | None:
    """Return how many rows each data-parallel rank must train per step, so that the step has the effective batch.

    Return None if any number is allowed, and 0 if no number works. With packing, the samples per step may differ from
    the effective batch by a third (PACKED)."""
    shares = smallest.launch.data_parallel_size
    if goal.effective_batch is None:
        return None
    if not smallest.optimizations.packing:
        return 0 if goal.effective_batch % shares else goal.effective_batch // shares
    samples = samples_per_step(smallest, goal.history)
    rows = round(goal.effective_batch / samples)
    return rows if abs(rows * samples / goal.effective_batch - 1) <= PACKED else 0


def _option(spec: Experiment, gpu: Gpu, goal: Goal, memory_cache: MemoryCache) -> Option:
    duration = estimate_duration(spec, gpu, goal.history)
    seconds = duration.seconds_for(goal.samples)
    price = goal.prices.of(gpu.name) if goal.prices else None
    return Option(
        spec, gpu, duration, memory_cache.estimate(spec, gpu), seconds, duration.joules_for(goal.samples),
        amount(price, duration.gpus * seconds.expected, duration.watts.expected) if price else None,
    )  # fmt: skip


def _location(spec: Experiment, gpu: Gpu) -> str:
    launch = spec.launch
    return gpu.name if launch.gpus == 1 else f"{launch.gpus} x {gpu.name} ({shared_how(launch)})"


def may_miss(option: Option, goal: Goal) -> bool:
    """Return whether an option may miss the deadline: the upper end of its time range is above the deadline."""
    return goal.deadline_s is not None and option.seconds.high > goal.deadline_s


def rank(option: Option, goal: Goal) -> tuple[bool, float, float]:
    """Return the sort key of an option: (may miss the deadline, value of the objective, time in seconds)."""
    cost = math.inf if option.cost is None else option.cost.value
    first = {
        "speed": option.seconds.expected, "cost": cost, "energy": option.joules.expected,
        "memory": option.memory.device.expected,
    }[goal.objective]  # fmt: skip
    return may_miss(option, goal), first, option.seconds.expected


def _missed(option: Option, goal: Goal) -> tuple[str, float] | None:
    """Return (limit, factor) of the most exceeded limit of an option. Return None if the option meets all limits."""
    misses = []
    if goal.deadline_s is not None and option.seconds.expected > goal.deadline_s:
        misses.append(("later than the deadline", option.seconds.expected / goal.deadline_s))
    if goal.max_cost is not None and option.cost is not None and option.cost.value > goal.max_cost:
        misses.append(("above --max-cost", option.cost.value / goal.max_cost))
    return max(misses, key=lambda pair: pair[1], default=None)


def _closest(fitting: Sequence[Option], goal: Goal) -> tuple[Option | None, str]:
    """Return the option that exceeds a limit by the smallest factor, and a text that names the limit and the factor."""
    misses = [(missed, option) for option in fitting if (missed := _missed(option, goal))]
    (limit, factor), option = min(misses, key=lambda pair: pair[0][1])
    return option, f"{limit} ({factor:,.2f} times)"


def as_runnable(option: Option, goal: Goal) -> Experiment:
    """Return the spec of an option, with the number of steps that trains the requested samples."""
    spec, steps = option.spec, max(1, math.ceil(goal.samples / option.duration.samples))
    if spec.train.max_steps is None and spec.dataset.samples is not None and goal.samples == epochs_samples(spec, 0):
        return spec
    return spec.model_copy(update={"train": spec.train.model_copy(update={"max_steps": steps})})
