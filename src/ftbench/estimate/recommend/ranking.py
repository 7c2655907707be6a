"""The best way to train a spec within a time, a budget and the memory of a GPU: every way estimated, and ranked."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ftbench.core import units
from ftbench.core.hardware import Gpu, capability_of
from ftbench.core.units import JOULES_PER_KWH
from ftbench.errors import SpecError
from ftbench.estimate.memory.estimate import Band, MemoryEstimate
from ftbench.estimate.memory.memory_cache import MemoryCache
from ftbench.estimate.recommend import candidates
from ftbench.estimate.recommend.candidates import Way
from ftbench.estimate.time.duration import DurationEstimate, epochs_samples, estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.time.rates import limits_of
from ftbench.estimate.workload.batches import batches_of, per_step
from ftbench.estimate.workload.sharding import on_gpus, sharding_of, shared_how
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.incompatibilities import machine_incompatibilities
from ftbench.spec.prices import Amount, Prices, amount
from ftbench.store.summary import optimizations_on

Objective = Literal["speed", "cost", "energy", "memory"]
OBJECTIVES = ("speed", "cost", "energy", "memory")
PACKED = 0.1  # how far the samples of a step of packed rows may be from the effective batch
_NO_ROWS = "packing counts rows, and no number of them holds as many samples as a step has (--effective-batch)"
_FREER = 1.25  # how many times better the best with another number of samples a step is, to be named
_FEW_GPUS = 3  # of more only the two most promising batches of each way are weighed


@dataclass(frozen=True, slots=True)
class Goal:
    """What is asked for. `samples` to train on, `deadline_s` and `max_cost` (in the currency of the prices) where there
    is a limit; `counts` of GPUs that may share the work; `effective_batch` samples a step, held by accumulation; None
    where any will do."""

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
    store: RunHistory = field(default_factory=RunHistory)
    config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """A way on a GPU with its batch. `cost` is None without a price."""

    spec: Experiment
    gpu: Gpu
    duration: DurationEstimate
    memory: MemoryEstimate
    seconds: Band
    joules: Band
    cost: Amount | None

    @property
    def headroom(self) -> float:
        """GiB between the expected device memory and what the GPU has."""
        return self.memory.total - self.memory.device.expected

    @property
    def kwh(self) -> float:
        return self.joules.expected / JOULES_PER_KWH


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`options` meet every limit by what is expected, best first; what may miss the deadline comes last. Where none
    does, `closest` fits a GPU and misses a limit by the least, and `missed` says which, or what comes closest to
    fitting. `ruled_out` counts ways by the reason, of `weighed`. `freer` is the best with any number of samples a step,
    where that is so much better that it is worth a word."""

    goal: Goal
    options: tuple[Option, ...]
    closest: Option | None
    missed: str
    ruled_out: dict[str, int]
    weighed: int
    freer: Option | None = None


def recommend(goal: Goal) -> Recommendation:
    """Raise SpecError for a spec that nothing is known of: a model without a shape, a precision in which no GPU has a
    rate."""
    unrated = {gpu: why for gpu in goal.gpus if (why := _unrated(gpu, goal))}
    if len(unrated) == len(goal.gpus):
        raise SpecError(*unrated.values())
    methods = goal.methods or candidates.own_kind(goal.spec)
    equal = len(set(goal.store.lengths(goal.spec).values)) == 1
    memory_cache, reasons, fitting, weighed = MemoryCache(config=goal.config), Counter[str](), list[Option](), 0
    shared = [launch for count in goal.counts for launch in candidates.launches(goal.spec, count, goal.config)]
    alone = on_gpus(goal.spec, 1, "none")
    ways = (way.on(launch) for way in candidates.ways(alone, methods, equal, goal.config) for launch in shared)
    seen = set[tuple[object, ...]]()
    for way in ways:
        for gpu in goal.gpus:
            known, weighed = len(seen), weighed + 1
            on = way.sized(1, 1, capability_of(gpu))
            seen.add((gpu.name, on.method, on.optimizations, on.train, on.launch))
            if len(seen) == known:  # an `auto` that is off here is another way's off
                continue
            outcome = _refused(way, gpu, unrated) or _best_batch(way, gpu, goal, memory_cache)
            if isinstance(outcome, str):
                reasons[outcome] += 1
            else:
                fitting.append(outcome)
    reasons.update(limit[0] for option in fitting if (limit := _missed(option, goal)))
    kept = sorted((option for option in fitting if not _missed(option, goal)), key=lambda each: _rank(each, goal))
    closest, missed = _closest(fitting, goal) if fitting and not kept else (None, "")
    if not fitting:
        missed = _least(goal, methods, memory_cache, unrated)
    return Recommendation(goal, tuple(kept), closest, missed, dict(reasons.most_common()), weighed)


def with_freer(answer: Recommendation) -> Recommendation:
    """Return the answer with what would be far better on the best option's GPU if a step need not hold the samples that
    it holds: rows that are packed hold so many that a small step has no room for one."""
    goal = answer.goal
    if not answer.options or goal.effective_batch is None or _NO_ROWS not in answer.ruled_out:
        return answer
    free = recommend(replace(goal, gpus=(answer.options[0].gpu,), effective_batch=None)).options
    better = free and _rank(free[0], goal)[1] * _FREER < _rank(answer.options[0], goal)[1]
    return replace(answer, freer=free[0]) if better else answer


def _refused(way: Way, gpu: Gpu, unrated: Mapping[Gpu, str]) -> str | None:
    if way.problems:
        return f"cannot work: {way.problems[0]}"
    if problems := machine_incompatibilities(way.spec, capability_of(gpu)):
        return f"not on {gpu.name}: {problems[0]}"
    return f"not on {gpu.name}: {unrated[gpu]}" if gpu in unrated else None


def _unrated(gpu: Gpu, goal: Goal) -> str | None:
    """Return why of a GPU no rate is known in the precision asked for."""
    try:
        limits_of(gpu, resolve(goal.spec, capability_of(gpu)).train.precision, False, goal.store.path)
    except SpecError as error:
        return str(error)
    return None


def _best_batch(way: Way, gpu: Gpu, goal: Goal, memory_cache: MemoryCache) -> Option | str:
    """Return the best batch of a way by the objective, of those that fit; the reason where none does."""
    capability = capability_of(gpu)
    effective = _rows_a_step(way.sized(1, 1, capability), goal)
    if effective == 0:
        if not way.spec.optimizations.packing:
            return f"the samples of a step do not divide by {way.spec.launch.gpus} GPUs (--effective-batch)"
        return _NO_ROWS
    smallest = way.sized(1, 2 if (effective or 1) > 1 else 1, capability)
    shares = sharding_of(way.spec.launch).data
    most = max(1, math.ceil(goal.samples / shares))  # the first step is a whole batch
    most = min(most, effective or most)
    if way.spec.objective.prompts:
        pairs = candidates.completions(way, gpu, effective, most, memory_cache)
    else:
        pairs = candidates.batches(memory_cache.largest_batch(smallest, gpu, most=most) or 0, effective)
    if not pairs:
        uncertain = memory_cache.estimate(smallest, gpu).verdict == "uncertain"
        return f"{'may not' if uncertain else 'does not'} fit at batch 1 on {place_of(way.spec, gpu)}"
    if len(goal.gpus) > _FEW_GPUS:  # a larger batch is rarely slower, and a smaller smallest needs less memory
        pairs = pairs[-2:] if goal.objective == "memory" else pairs[:2]
    options = [_option(way.sized(*pair, capability), gpu, goal, memory_cache) for pair in pairs]
    within = [option for option in options if not _missed(option, goal)]
    best = min(within or options, key=lambda option: _rank(option, goal))
    train = best.spec.train
    as_asked = candidates.with_batch(way.spec, train.batch_size, train.gradient_accumulation_steps)
    return replace(best, spec=as_asked)


def _rows_a_step(smallest: Experiment, goal: Goal) -> int | None:
    """Return how many rows of a GPU's batch make a step of the effective batch, which is None where any may be: of
    packed rows as many as hold about that many samples (within PACKED), 0 where no number of rows does."""
    shares = sharding_of(smallest.launch).data
    if goal.effective_batch is None:
        return None
    if not smallest.optimizations.packing:
        return 0 if goal.effective_batch % shares else goal.effective_batch // shares
    samples = shares * per_step(smallest, batches_of(smallest, goal.store.lengths(smallest)), "samples")
    rows = round(goal.effective_batch / samples)
    return rows if abs(rows * samples / goal.effective_batch - 1) <= PACKED else 0


def _option(spec: Experiment, gpu: Gpu, goal: Goal, memory_cache: MemoryCache) -> Option:
    duration = estimate_duration(spec, gpu, goal.store, config=goal.config)
    seconds = duration.seconds_for(goal.samples)
    price = goal.prices.of(gpu.name) if goal.prices else None
    return Option(
        spec, gpu, duration, memory_cache.estimate(spec, gpu), seconds, duration.joules_for(goal.samples),
        amount(price, duration.gpus * seconds.expected, duration.watts.expected) if price else None,
    )  # fmt: skip


def place_of(spec: Experiment, gpu: Gpu) -> str:
    """Return `H200 SXM`, `4 x H200 SXM (fsdp)`, `4 x H200 SXM (fsdp, params offloaded)`."""
    launch = spec.launch
    if launch.gpus == 1:
        return gpu.name
    return f"{launch.gpus} x {gpu.name} ({shared_how(launch)})"


def may_miss(option: Option, goal: Goal) -> bool:
    """Return whether the slow end of an option's time lies beyond the deadline."""
    return goal.deadline_s is not None and option.seconds.high > goal.deadline_s


def _rank(option: Option, goal: Goal) -> tuple[bool, float, float]:
    """Return what the options are sorted by: first those that keep the deadline also at the slow end of their time."""
    cost = math.inf if option.cost is None else option.cost.value
    first = {
        "speed": option.seconds.expected, "cost": cost, "energy": option.joules.expected,
        "memory": option.memory.device.expected,
    }[goal.objective]  # fmt: skip
    return may_miss(option, goal), first, option.seconds.expected


def _missed(option: Option, goal: Goal) -> tuple[str, float] | None:
    """Return the limit that an option misses by the most, and by which factor."""
    misses = []
    if goal.deadline_s is not None and option.seconds.expected > goal.deadline_s:
        misses.append(("later than the deadline", option.seconds.expected / goal.deadline_s))
    if goal.max_cost is not None and option.cost is not None and option.cost.value > goal.max_cost:
        misses.append(("dearer than --max-cost", option.cost.value / goal.max_cost))
    return max(misses, key=lambda pair: pair[1], default=None)


def _closest(fitting: Sequence[Option], goal: Goal) -> tuple[Option | None, str]:
    """Return the option that misses its limit by the least, and the limit in words."""
    misses = [(missed, option) for option in fitting if (missed := _missed(option, goal))]
    (limit, factor), option = min(misses, key=lambda pair: pair[0][1])
    if limit.startswith("later"):
        took = f"{units.seconds(option.seconds.expected)} where there are {units.seconds(goal.deadline_s)}"
    else:
        assert option.cost is not None
        took = f"{option.cost} where there are {units.money(goal.max_cost, option.cost.currency)}"
    return option, f"{limit}: {took}, {factor:,.2f} times"


def _least(goal: Goal, methods: Sequence[str], memory_cache: MemoryCache, unrated: Mapping[Gpu, str]) -> str:
    """Return what comes closest to fitting a GPU, in words; nothing where every way was refused for another reason."""
    estimates = [
        (memory.device.high - memory.total, way.spec, gpu, memory)
        for way in candidates.ways(goal.spec, methods, True, goal.config)
        for gpu in goal.gpus if not _refused(way, gpu, unrated)
        for memory in [memory_cache.estimate(candidates.with_batch(way.spec, 1, 1), gpu)]
    ]  # fmt: skip
    if not estimates:
        return ""
    _, spec, gpu, memory = min(estimates, key=lambda each: each[0])
    on = ", ".join(optimizations_on(spec.optimizations.model_dump())) or "no optimization"
    return (
        f"{spec.method.name} with {on} on {gpu.name}: to be sure of batch 1 it needs "
        f"{units.gibibytes(memory.device.high)} GiB of {units.gibibytes(memory.total)}"
    )


def as_runnable(option: Option, goal: Goal) -> Experiment:
    """Return the spec that trains on as many samples as were asked for, runnable as it is."""
    spec = option.spec
    name = f"{goal.spec.name[:75]}-best"
    steps = max(1, math.ceil(goal.samples / option.duration.samples))
    data = spec.dataset
    if spec.train.max_steps is None and data.samples is not None and goal.samples == epochs_samples(spec, 0):
        return spec.model_copy(update={"name": name})
    return spec.model_copy(update={"name": name, "train": spec.train.model_copy(update={"max_steps": steps})})
