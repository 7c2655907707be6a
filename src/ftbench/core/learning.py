"""Whether two runs learn the same: one metric for every pair of runs, and a verdict that admits what the data cannot
tell.

The metric is the relative difference of the mean loss a label token over the samples that both runs have seen, in whole
steps. It holds for any two runs on the same samples, also where one packs several samples into a row, so that no step
of one is a step of the other. The gradient norm is held beside it where steps hold equally many samples.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul

from ftbench.core.stats import t_quantile
from ftbench.core.units import difference, some

FOLLOWS, DIFFERS, CANNOT_TELL, NOT_FINITE = "follows", "does not follow", "cannot tell", "not finite"
FEWEST_STEPS = 6  # with fewer, what a run has learned is not told from noise
_OUTSIDE = 0.05  # share of the paired steps that may lie outside the tolerance
_SAME_SIZE = 0.01  # steps whose mean numbers of samples differ by less are called equally large
_START = 0.1  # share of the steps that say where a loss began


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """What one optimizer step says about learning: its number, its samples and label tokens, the mean loss a label
    token in nats, and the norm of the gradient before clipping. None is unknown; NaN and infinity were recorded."""

    step: int
    samples: float | None
    labels: float | None
    loss: float | None
    grad_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Learning:
    """A verdict (`FOLLOWS`, `DIFFERS`, `CANNOT_TELL`, `NOT_FINITE`) with its reason. `change` is the signed relative
    difference of the mean losses, `tolerance` the share allowed, `learned` what `learned` gives for the reference,
    `grad_norm` the signed relative difference of the gradient norms; `worst` is the largest share by which the loss of
    a step differs, in step `step`, where steps pair. What is not known is None."""

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
        """Whether the candidate is known not to learn what the reference learns."""
        return self.verdict in (DIFFERS, NOT_FINITE)


def learning_verdict(
    reference: Sequence[TrainedStep], candidate: Sequence[TrainedStep], tolerance: float, *, paired: bool
) -> Learning:
    """Judge whether `candidate` learns what `reference` learns; both trained on the same samples.

    `paired` says that step i of one trained on the samples of step i of the other. A loss or gradient norm of the
    candidate that is NaN or infinite is NOT_FINITE. DIFFERS are mean losses further apart than `tolerance` (a share),
    or losses of more than one in twenty paired steps. CANNOT_TELL is the answer where the reference has learned no more
    than the tolerance: a run that learns nothing would have passed too.
    """
    if broken := not_finite(candidate):
        return Learning(NOT_FINITE, broken)
    if broken := not_finite(reference):
        return Learning(CANNOT_TELL, f"of the baseline, {broken}")
    sides = _common_steps(reference, candidate) if paired else _common_samples(reference, candidate)
    means = mean_loss(sides[0]), mean_loss(sides[1])
    if not means[0] or means[1] is None:
        return Learning(CANNOT_TELL, "no whole step of both has a loss")
    change = means[1] / means[0] - 1
    shares = _shares(*sides) if paired else {}
    step, worst = max(shares.items(), key=lambda item: (item[1], -item[0]), default=(None, None))
    progress, allowed = learned(sides[0]), f"{tolerance * 100:g} %"
    verdict, reason = FOLLOWS, ""
    if abs(change) > tolerance:
        verdict, reason = DIFFERS, f"its mean loss differs by {difference(change)}, allowed are {allowed}"
    elif sum(share > tolerance for share in shares.values()) > _OUTSIDE * len(shares):
        verdict = DIFFERS
        reason = f"its loss differs by {(worst or 0) * 100:.2g} % in step {step}, allowed are {allowed}"
    elif progress is None:
        verdict, reason = CANNOT_TELL, f"fewer than {FEWEST_STEPS} steps"
    elif progress <= tolerance:
        amount = f"only {progress * 100:.2g} %" if progress else "nothing"
        verdict = CANNOT_TELL
        reason = f"the baseline learned {amount} that can be told from noise, where {allowed} of difference are allowed"
    return Learning(verdict, reason, change, tolerance, progress, grad_norm_change(*sides), worst, step)


def not_finite(steps: Sequence[TrainedStep]) -> str:
    """Return a clause that names the steps whose loss or gradient norm is NaN or infinite; empty where none is."""
    for noun in ("loss", "grad_norm"):
        if broken := [
            step.step for step in steps if (value := getattr(step, noun)) is not None and not math.isfinite(value)
        ]:
            name = noun.replace("grad_norm", "gradient norm")
            return f"the {name} is not a number in {some(len(broken), 'step')}, first in step {broken[0]}"
    return ""


def mean_loss(steps: Sequence[TrainedStep]) -> float | None:
    """Return the mean loss a label token, in nats; where label tokens are unknown, the mean of the steps."""
    losses = [step.loss for step in steps if step.loss is not None]
    labels = [step.labels for step in steps if step.labels and step.loss is not None]
    weights = labels if len(labels) == len(losses) else [1.0] * len(losses)
    return math.fsum(map(mul, weights, losses)) / math.fsum(weights) if losses else None


def learned(steps: Sequence[TrainedStep]) -> float | None:
    """Return the share of the mean loss by which a run that stays where these steps began would differ from them, as
    far as it exceeds chance; 0 where the loss did not fall, None with fewer than `FEWEST_STEPS` losses.

    The beginning is the first tenth of the steps. Chance is 1.96 standard errors, with the noise of a step taken from
    the differences of successive steps, which a trend hardly moves (J. von Neumann, Ann. Math. Stat. 12, 1941).
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
    """Return the signed relative difference of the median gradient norms; None where one is not known, and where steps
    hold different numbers of samples: a gradient is a mean over them."""
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
    """Return the whole steps of both, from the first, over as many samples as both have seen; nothing where a step does
    not know its samples, its label tokens or its loss."""
    windows = reference, candidate
    if any(None in (step.samples, step.labels, step.loss) for side in windows for step in side):
        return [], []
    for _ in range(2):  # the shorter of two windows of whole steps limits the other once more
        seen = min(sum(step.samples or 0.0 for step in side) for side in windows)
        windows = _whole_steps(windows[0], seen), _whole_steps(windows[1], seen)
    return windows


def _whole_steps(steps: Sequence[TrainedStep], limit: float) -> Sequence[TrainedStep]:
    """Return the steps, from the first, that have together seen at most `limit` samples."""
    seen = 0.0
    for count, step in enumerate(steps):
        seen += step.samples or 0.0
        if seen > limit:
            return steps[:count]
    return steps


def _shares(reference: Sequence[TrainedStep], candidate: Sequence[TrainedStep]) -> dict[int, float]:
    """Return step → the share by which its losses differ."""
    return {
        before.step: abs(after.loss / before.loss - 1)
        for before, after in zip(reference, candidate, strict=True)
        if before.loss and after.loss is not None
    }


def equivalence(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 90 % interval of the mean of paired differences. Two one-sided tests at 5 % find two ways of training
    equivalent where it is within the margin (D. J. Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987). One difference
    has no spread: the interval is the value itself."""
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return mean, mean
    half = t_quantile(0.95, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return mean - half, mean + half
