"""The largest batch that fits: which batch to try next, and what the trials say. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KNEE = 1.05  # speed that grows by less is called no growth
_GUESSES = 2  # trials that trust the memory line before plain bisection


@dataclass(frozen=True, slots=True)
class Trial:
    """One batch size that was tried. `fits` is None where the run failed for another reason than memory. Speed in real
    tokens/s, memory in GiB: `peak_gb` the allocator's pool, `beside_gb` what the device holds beside it, `capacity_gb`
    the device's."""

    batch: int
    fits: bool | None
    speed: float | None = None
    peak_gb: float | None = None
    beside_gb: float | None = None
    capacity_gb: float | None = None
    reason: str | None = None
    oom: dict[str, Any] | None = None


def next_batch(trials: Sequence[Trial], candidates: Sequence[int], seed: int | None = None) -> int | None:
    """Return the batch to try next of `candidates` (ascending), or None when the frontier is known: doubling up to the
    first that does not fit, then between the two. The first tries in between follow the line through the measured
    peaks; where it misleads, bisection takes over. `seed` is the largest that is expected to fit: doubling ends there,
    and goes on from there in steps of 1, 2, 4."""
    if any(trial.fits is None for trial in trials):
        return None
    fitting = [trial.batch for trial in trials if trial.fits]
    failing = [trial.batch for trial in trials if trial.fits is False]
    if not trials:
        return candidates[0]
    if not failing:
        return _larger(max(fitting), candidates, seed)
    low, high = max(fitting, default=0), min(failing)
    between = [batch for batch in candidates if low < batch < high]
    if not between or not fitting:
        return None if not fitting and high == candidates[0] else (between[len(between) // 2] if between else None)
    if (guess := _largest_on_the_line(trials)) is not None and _guessed(trials, candidates) < _GUESSES:
        below = [batch for batch in between if batch <= guess]
        return max(below) if below else min(between)
    return between[len(between) // 2]


def _larger(largest: int, candidates: Sequence[int], seed: int | None) -> int | None:
    """Return the next batch while all have fitted."""
    larger = [batch for batch in candidates if batch > largest]
    wanted = 2 * largest
    if seed is not None and largest < seed:
        below = [batch for batch in larger if batch <= seed]
        wanted = min(wanted, max(below, default=wanted))
    elif seed is not None:
        wanted = largest + max(1, 2 * (largest - seed))
    return min((batch for batch in larger if batch >= wanted), default=max(larger, default=None))


def _guessed(trials: Sequence[Trial], candidates: Sequence[int]) -> int:
    """Return how many trials are no step of the doubling."""
    doubling, batch = set(), candidates[0]
    while batch is not None and batch not in doubling:
        doubling.add(batch)
        batch = min((other for other in candidates if other >= 2 * batch), default=max(candidates))
    return sum(trial.batch not in doubling for trial in trials)


def _largest_on_the_line(trials: Sequence[Trial]) -> float | None:
    """Return the batch at which the line through the two largest measured peaks reaches the device's memory."""
    known = sorted(
        (t.batch, t.peak_gb, t.capacity_gb - (t.beside_gb or 0.0))
        for t in trials
        if t.fits and t.peak_gb is not None and t.capacity_gb is not None
    )
    if len(known) < 2:
        return None
    (low, first_gb, _), (high, last_gb, available_gb) = known[-2:]
    slope = (last_gb - first_gb) / (high - low)
    return high + (available_gb - last_gb) / slope if slope > 0 else None


def peak_on_the_line(trials: Sequence[Trial], batch: int) -> float | None:
    """Return the GiB that a batch is expected to need: as measured, or on the line through the two nearest measured."""
    measured = {trial.batch: trial.peak_gb for trial in trials if trial.peak_gb is not None}
    known = sorted(measured.items(), key=lambda pair: abs(pair[0] - batch))
    if known and known[0][0] == batch:
        return known[0][1]
    if len(known) < 2:
        return None
    (near, near_gb), (far, far_gb) = known[:2]
    return near_gb + (far_gb - near_gb) / (far - near) * (batch - near)


@dataclass(frozen=True, slots=True)
class Edge:
    """What is known of a frontier: the largest that fits, the smallest that does not, the knee, what is left to say."""

    largest: Trial | None
    first_failing: Trial | None
    knee: int | None
    note: str


def edge(trials: Sequence[Trial], candidates: Sequence[int], limited_by: str, seed: int | None = None) -> Edge:
    """Return the edge that trials show; `limited_by` says what ends the candidates: `the data set has 200 samples`."""
    fitting = sorted((trial for trial in trials if trial.fits), key=lambda trial: trial.batch)
    failing = sorted((trial for trial in trials if trial.fits is False), key=lambda trial: trial.batch)
    broken = [trial for trial in trials if trial.fits is None]
    note = ""
    if broken:
        note = f"stopped at batch {broken[0].batch}: {broken[0].reason}"
    elif next_batch(trials, candidates, seed) is not None:
        note = "not finished"
    elif fitting and not failing:
        note = f"not reached: {limited_by}"
    return Edge(fitting[-1] if fitting else None, failing[0] if failing else None, knee(fitting), note)


def knee(fitting: Sequence[Trial]) -> int | None:
    """Return the smallest batch after which no larger one is 5 % faster; None where fewer than two speeds are known."""
    known = sorted((trial.batch, trial.speed) for trial in fitting if trial.speed)
    if len(known) < 2:
        return None
    for i, (batch, speed) in enumerate(known):
        if all(later < KNEE * speed for _, later in known[i + 1 :]):
            return batch
    return None
