"""Compare what two runs learn.

The metric is the relative difference of the mean loss per label token over the samples that both runs have trained on.
It also works if one run packs several samples into a row, so that steps cannot be paired. Gradient norms are compared
if steps have equally many samples.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul

from ftbench.core.stats import t_quantile
from ftbench.core.units import difference, some

FOLLOWS, DIFFERS, INCONCLUSIVE, NOT_FINITE = "follows", "does not follow", "inconclusive", "not finite"
FEWEST_STEPS = 6  # with fewer steps, progress cannot be separated from noise
_OUTSIDE = 0.05  # share of the paired steps that may exceed the tolerance
_SAME_SIZE = 0.01  # relative difference of mean samples per step that counts as equal
_START = 0.1  # share of the steps that define the initial loss


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One optimizer step: mean loss per label token in nats, gradient norm before clipping. None is unknown; NaN and
    infinity are recorded values."""

    step: int
    samples: float | None
    labels: float | None
    loss: float | None
    grad_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Learning:
    """The result of a comparison. Unknown values are None.

    Attributes:
        verdict: `FOLLOWS`, `DIFFERS`, `INCONCLUSIVE` or `NOT_FINITE`.
        reason: Why the verdict is not `FOLLOWS`.
        change: Signed relative difference of the mean losses.
        tolerance: Allowed relative difference.
        learned: Progress of the reference (see `learned`).
        grad_norm: Signed relative difference of the gradient norms.
        worst: Largest relative difference of the losses of paired steps.
        step: The step of `worst`.
    """

    verdict: str
    reason: str = ""
    change: float | None = None
    tolerance: float | None = None
    learned: float | None = None
    grad_norm: float | None = None
    worst: float | None = None
    step: int | None = None

    @property
    def failed(self) -> bool:
        """Whether the candidate learns something else than the reference."""
        return self.verdict in (DIFFERS, NOT_FINITE)


def learning_verdict(
    reference: Sequence[TrainedStep], candidate: Sequence[TrainedStep], tolerance: float, *, paired: bool
) -> Learning:
    """Return whether `candidate` learns what `reference` learns. Both must have trained on the same samples.

    - NOT_FINITE: a loss or gradient norm of the candidate is NaN or infinite.
    - DIFFERS: the mean losses, or the losses of more than 5 % of the paired steps, differ by more than the tolerance.
    - INCONCLUSIVE: the loss of the reference fell by less than the tolerance. A run that learns nothing would pass.

    Args:
        reference: Steps of the plain run.
        candidate: Steps of the other run.
        tolerance: Allowed relative difference.
        paired: Whether step i of both runs trained on the same samples.
    """
    if broken := not_finite(candidate):
        return Learning(NOT_FINITE, broken)
    if broken := not_finite(reference):
        return Learning(INCONCLUSIVE, f"in the baseline, {broken}")
    sides = _common_steps(reference, candidate) if paired else _common_samples(reference, candidate)
    means = mean_loss(sides[0]), mean_loss(sides[1])
    if not means[0] or means[1] is None:
        return Learning(INCONCLUSIVE, "the runs have no common steps with a loss")
    change = means[1] / means[0] - 1
    shares = _shares(*sides) if paired else {}
    step, worst = max(shares.items(), key=lambda item: (item[1], -item[0]), default=(None, None))
    progress, allowed = learned(sides[0]), f"{tolerance * 100:g} %"
    verdict, reason = FOLLOWS, ""
    if abs(change) > tolerance:
        verdict, reason = DIFFERS, f"its mean loss differs by {difference(change)}, allowed: {allowed}"
    elif sum(share > tolerance for share in shares.values()) > _OUTSIDE * len(shares):
        verdict = DIFFERS
        reason = f"its loss differs by {(worst or 0) * 100:.2g} % in step {step}, allowed: {allowed}"
    elif progress is None:
        verdict, reason = INCONCLUSIVE, f"fewer than {FEWEST_STEPS} steps"
    elif progress <= tolerance:
        fell = f"fell only {progress * 100:.2g} % beyond noise" if progress else "did not fall beyond noise"
        verdict, reason = INCONCLUSIVE, f"the baseline's loss {fell}; the tolerance is {allowed}"
    return Learning(verdict, reason, change, tolerance, progress, grad_norm_change(*sides), worst, step)


def not_finite(steps: Sequence[TrainedStep]) -> str:
    """Return a clause that names the steps with a NaN or infinite loss or gradient norm; otherwise an empty text."""
    for noun in ("loss", "grad_norm"):
        if broken := [
            step.step for step in steps if (value := getattr(step, noun)) is not None and not math.isfinite(value)
        ]:
            name = noun.replace("grad_norm", "gradient norm")
            return f"the {name} is not a number in {some(len(broken), 'step')}, first in step {broken[0]}"
    return ""


def mean_loss(steps: Sequence[TrainedStep]) -> float | None:
    """Return the mean loss per label token in nats, or the mean over steps if label tokens are unknown."""
    losses = [step.loss for step in steps if step.loss is not None]
    labels = [step.labels for step in steps if step.labels and step.loss is not None]
    weights = labels if len(labels) == len(losses) else [1.0] * len(losses)
    return math.fsum(map(mul, weights, losses)) / math.fsum(weights) if losses else None


def learned(steps: Sequence[TrainedStep]) -> float | None:
    """Return how far the mean loss fell below the initial loss beyond noise, relative to the mean loss.

    The initial loss is the mean of the first tenth of the steps. Noise is 1.96 standard errors, computed from the
    differences of successive steps, which are insensitive to a trend (J. von Neumann, Ann. Math. Stat. 12, 1941).

    Returns:
        0 if the loss did not fall, None with fewer than `FEWEST_STEPS` losses.
    """
    losses = [step.loss for step in steps if step.loss is not None]
    mean = mean_loss(steps)
    if len(losses) < FEWEST_STEPS or not mean:
        return None
    begin = max(1, round(_START * len(losses)))
    noise = math.sqrt(statistics.fmean((after - before) ** 2 for before, after in pairwise(losses)) / 2)
    chance = 1.96 * noise * math.sqrt(1 / begin + 1 / len(losses))
    return max(0.0, statistics.fmean(losses[:begin]) - mean - chance) / mean


def grad_norm_change(reference: Sequence[TrainedStep], candidate: Sequence[TrainedStep]) -> float | None:
    """Return the signed relative difference of the median gradient norms. None if unknown, or if steps have different
    numbers of samples, because a gradient is a mean over samples."""
    sizes = [[step.samples for step in side if step.samples] for side in (reference, candidate)]
    norms = [[step.grad_norm for step in side if step.grad_norm] for side in (reference, candidate)]
    if not all(sizes) or not all(norms):
        return None
    if abs(statistics.fmean(sizes[1]) / statistics.fmean(sizes[0]) - 1) > _SAME_SIZE:
        return None
    return statistics.median(norms[1]) / statistics.median(norms[0]) - 1


_Sides = tuple[Sequence[TrainedStep], Sequence[TrainedStep]]


def _common_steps(reference: Sequence[TrainedStep], candidate: Sequence[TrainedStep]) -> _Sides:
    before, after = ({step.step: step for step in side if step.loss is not None} for side in (reference, candidate))
    common = sorted(before.keys() & after.keys())
    return [before[step] for step in common], [after[step] for step in common]


def _common_samples(reference: Sequence[TrainedStep], candidate: Sequence[TrainedStep]) -> _Sides:
    """Return the first steps of both runs, cut to the same number of samples. Return nothing if samples, label tokens
    or losses are unknown."""
    windows = reference, candidate
    if any(None in (step.samples, step.labels, step.loss) for side in windows for step in side):
        return [], []
    for _ in range(2):  # the shorter window limits the longer one again
        seen = min(sum(step.samples or 0.0 for step in side) for side in windows)
        windows = _whole_steps(windows[0], seen), _whole_steps(windows[1], seen)
    return windows


def _whole_steps(steps: Sequence[TrainedStep], limit: float) -> Sequence[TrainedStep]:
    """Return the first steps with at most `limit` samples in total."""
    seen = 0.0
    for count, step in enumerate(steps):
        seen += step.samples or 0.0
        if seen > limit:
            return steps[:count]
    return steps


def _shares(reference: Sequence[TrainedStep], candidate: Sequence[TrainedStep]) -> dict[int, float]:
    """Return step → relative difference of its losses."""
    return {
        before.step: abs(after.loss / before.loss - 1)
        for before, after in zip(reference, candidate, strict=True)
        if before.loss and after.loss is not None
    }


def equivalence(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 90 % interval of the mean of paired differences. Two one-sided tests at 5 % judge two trainings as
    equivalent if this interval is within the margin (D. J. Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987). One
    difference has no spread: the interval is the value itself."""
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return mean, mean
    half = t_quantile(0.95, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return mean - half, mean + half
