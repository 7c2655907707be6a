"""Judge a recipe at the three levels of a parity check: forward, gradient and training.

The reference is the plain recipe in float32. The error of a recipe is its difference from this reference. If a recipe
differs only in rounding, its limit is twice the error of the plain recipe in bfloat16 (as in FlashAttention's tests,
arXiv 2205.14135). For a recipe with 8-bit products, the plain recipe also rounds the inputs of products to 8 bits. For
8-bit products and mixtures of experts, several plain runs are combined. Other recipes have fixed limits (`BUDGETS`).
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.core.stats import equivalence, grouped_by
from ftbench.spec.experiment import Experiment
from ftbench.sweep.parity_records import CHANGES, FAIL, INCONCLUSIVE, PASS, POINTS, layer_of, module_of

_Errors = dict[tuple[str, str, str], dict[str, float]]  # (point, change, direction or norm) → tensor → error
EVERY, PLAIN, EIGHT_BIT = "all tensors", "plain bfloat16", "8-bit products"
LEVELS = ("forward", "gradient", "training")
FACTOR = 2.0  # times the error of plain bfloat16, for a mean over samples or a median over tensors
ONE_TENSOR = {"direction": 4.0, "norm": 7.0}  # the same, for a single tensor (tests/test_verdicts.py)
SMALL = 0.005  # least limit of a norm error; Adam's first steps have nearly the same norm in all recipes
UNRELATED = 1.3  # largest limit of a direction error (sqrt(2): unrelated directions)
CLIPPING = 2.0**-7  # clipping in bfloat16 rounds the norm of all gradients and the factor, each by at most 2**-8
SPREAD = 4.0  # least ratio of the loss that training removes and the spread between seeds, which sets the margin
LEARNED = 0.05  # allowed difference of held-out losses, as a share of the loss that training removes


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """The largest allowed errors of a recipe. `loss` limits the root mean square of the loss differences in nats.

    g is the gradient of a tensor, and r is the gradient of the reference. `direction` limits the norm of
    `g / |g| - r / |r|`. `norm` limits `abs(log(|g| / |r|))`. `update` limits the direction error of the weight change.
    Medians over tensors have half of these limits. A limit of None is computed from the errors of plain bfloat16."""

    source: str
    loss: float | None = None
    direction: float | None = None
    norm: float | None = None
    update: float | None = None


BUDGETS = {
    "float32": ErrorBudget(
        "sums have another order; errors of eight correct variants of a tiny model: at most 4e-6 nats (loss), 1e-5 "
        "(gradient) and 1e-3 (weight change, in which Adam divides by the gradient)", 1e-4, 1e-3, 1e-3, 0.01,
    ),
    "16 bits": ErrorBudget("twice the error of plain bfloat16, measured in the same check", norm=SMALL),
    "4-bit weights": ErrorBudget(
        "twice the error of plain bfloat16, because the reference has the same 4-bit weights; NF4 itself changes "
        "weights by about 9 % (T. Dettmers et al., arXiv 2305.14314)", norm=SMALL,
    ),
    EIGHT_BIT: ErrorBudget(
        "twice the error of three runs of plain bfloat16 that round inputs and weights of products to E4M3, gradients "
        "to E5M2, and multiply in 32 bits (P. Micikevicius et al., arXiv 2209.05433)", norm=SMALL,
    ),
    "8-bit optimizer states": ErrorBudget(
        "block-wise 8-bit states have a relative error of about 1 % (T. Dettmers et al., arXiv 2110.02861), which "
        "Adam's division raises for small entries", norm=0.06, update=0.5,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LevelResult:
    """The result of one level of a parity check. `number` and `limit` are those of the worst comparison."""

    level: str
    state: str
    sentence: str
    number: float | None = None
    limit: float | None = None


def kinds(spec: Experiment) -> tuple[str, ...]:
    """Return the keys of `BUDGETS` that apply to a resolved spec. The first is the precision of matrix products."""
    if spec.optimizations.fp8 != "off":
        products = EIGHT_BIT
    elif spec.train.precision == "fp32" and spec.model.dtype == "float32":
        products = "float32"
    else:
        products = "4-bit weights" if spec.method.quantised else "16 bits"
    return (products, "8-bit optimizer states") if "8bit" in spec.train.optimizer else (products,)


def rounds(spec: Experiment) -> bool:
    """Return whether the error limits of a spec are computed from the errors of plain bfloat16, not fixed."""
    return BUDGETS[kinds(spec)[0]].loss is None


def forward(record: Mapping[str, Any], rounding: Sequence[Mapping[str, Any]], spec: Experiment) -> LevelResult:
    """Return the result of the forward level: compare losses per sample with the reference at the same weights.

    The root mean square error over the samples of all plain runs in `rounding` sets the limit."""
    if problem := [each for each in record["problems"] if "tokens or labels" in each or "loss of a sample" in each]:
        return LevelResult("forward", FAIL, problem[0])
    if not record["losses"]:
        return LevelResult("forward", INCONCLUSIVE, "; ".join(record["problems"]) or "nothing was recorded")
    budget, checks = BUDGETS[kinds(spec)[0]], list[_Check]()
    plain = {name: _root_mean_square(_rms(other["losses"][name]) for other in rounding) for name in record["losses"]
             if rounding and all(name in other["losses"] for other in rounding)}  # fmt: skip
    for when, pair in record["losses"].items():
        same = when.rpartition(" ")[2]  # both points count, because one batch has few samples
        allowed = [error for name, error in plain.items() if name.endswith(same)]
        if budget.loss is None and not allowed:
            return LevelResult("forward", INCONCLUSIVE, f"{PLAIN} has no finite loss {same} the steps to compare with")
        limit = FACTOR * max(allowed) if budget.loss is None else budget.loss
        checks.append(_Check(f"loss per sample, {when} the steps", _rms(pair), limit))
    return _result("forward", checks, "nats")


def gradient(record: Mapping[str, Any], rounding: Sequence[Mapping[str, Any]], spec: Experiment) -> LevelResult:
    """Compare gradients and weight changes with the reference, and return the result. A missing gradient fails."""
    if not record["losses"]:
        return LevelResult("gradient", INCONCLUSIVE, "; ".join(record["problems"]) or "nothing was recorded")
    # bfloat16 weights near 1 cannot change by less than 0.004, neither in the recipe nor in plain bfloat16.
    rounded = set.intersection(*({*other["problems"]} for other in rounding)) if rounding else set()
    if problems := [each for each in record["problems"] if each not in rounded or "no weight change" not in each]:
        return LevelResult("gradient", FAIL, "; ".join(problems[:3]) + ("; …" if problems[3:] else ""))
    if rounds(spec) and not (rounding and all(other["tensors"] for other in rounding)):
        return LevelResult("gradient", INCONCLUSIVE, f"{PLAIN} has no finite gradient to compare with")
    return _result("gradient", tensor_checks(record, rounding, spec), "")


def training(
    reference: Sequence[float], candidate: Sequence[float], untrained: float | None, steps: int
) -> LevelResult:
    """Return the result of the training level: test if held-out losses are equivalent to those of the reference."""
    if not all(map(math.isfinite, candidate)):
        return LevelResult("training", FAIL, "a held-out loss is not finite")
    if untrained is None or not all(map(math.isfinite, (*reference, untrained))):
        return LevelResult("training", INCONCLUSIVE, "a held-out loss of the reference is missing or not finite")
    learned, spread = untrained - statistics.fmean(reference), max(reference) - min(reference)
    if learned <= SPREAD * spread:
        sentence = f"the reference learned {learned:.3g} nats in {steps} steps, and its seeds differ by {spread:.3g}"
        return LevelResult("training", INCONCLUSIVE, f"{sentence}: train longer, or on other data")
    margin = max(spread, LEARNED * learned)
    low, high = equivalence([after - before for before, after in zip(reference, candidate, strict=True)])
    number, interval = max(abs(low), abs(high)), f"held-out loss differs by {low:+.3g} to {high:+.3g} nats (90 %)"
    if number <= margin:
        return LevelResult("training", PASS, interval, number, margin)
    if low > margin or high < -margin:
        return LevelResult("training", FAIL, interval, number, margin)
    middle = abs(low + high) / 2  # a wide interval does not show that a control is damaged
    more = ", which neither shows nor excludes a difference: use more seeds or steps"
    return LevelResult("training", INCONCLUSIVE, f"{interval}{more}", middle, margin)


@dataclass(frozen=True, slots=True)
class _Check:
    what: str
    number: float
    limit: float

    @property
    def share(self) -> float:
        """`number / limit`: 0 if both are 0, infinity if only the limit is 0 or if the number is not finite."""
        if not math.isfinite(self.number):
            return math.inf
        return self.number / self.limit if self.limit else math.inf if self.number else 0.0


def _result(level: str, checks: Sequence[_Check], unit: str) -> LevelResult:
    if not checks:
        return LevelResult(level, INCONCLUSIVE, "the reference has no finite value to compare")
    worst = max(checks, key=lambda check: check.share)
    others = sum(check.share > 1 for check in checks) - 1
    more = f" (and {others} more of {len(checks)} checks)" if others > 0 else ""
    state = FAIL if worst.share > 1 else PASS
    return LevelResult(level, state, f"{worst.what}: {worst.number:.2g} {unit}".rstrip() + more,
                       worst.number, worst.limit)  # fmt: skip


def tensor_checks(record: Mapping[str, Any], rounding: Sequence[Mapping[str, Any]], spec: Experiment) -> list[_Check]:
    """Return (name, error, limit) of each tensor, and of the medians over each layer, each module and all tensors.

    A limit is a multiple of the error of plain bfloat16 in the same tensor or group, or in all tensors if it is larger.
    Of several plain runs, the median direction error and the root mean square of the norm errors count.
    A weight change is not checked if plain bfloat16 rounds it to zero. Clipping multiplies all second moments by one
    factor. If gradients have 16 bits, the rounding of this factor is added to the limits of second moments."""
    names, in_16_bits = kinds(spec), spec.method.name == "full" and spec.model.dtype != "float32"
    errors, allowed = _errors([record], in_16_bits and "torchao" in spec.train.optimizer), _errors(rounding)
    checks = []
    for (point, change, what), recorded in errors.items():
        known = allowed.get((point, change, what), {})
        tensors = {name: error for name, error in recorded.items() if not rounding or name in known}
        of_step, budget = CHANGES[change] == "weight change", _budget(names, change, what)
        # Norm errors scatter around 0, so the median of a few can be small by chance. Rounding changes the directions
        # of Adam's steps, and thus the norm of their sum.
        typical, factor = (_root_mean_square, FACTOR * (1 + of_step)) if what == "norm" else (_median, FACTOR)
        plain_typical = typical(known.values())
        # One tensor in one batch has few samples: the norm errors of gradients at both points count.
        points = POINTS if what == "norm" and not of_step else (point,)
        plain_both = [typical(allowed.get((each, change, what), {}).values()) for each in points]
        rounded = CLIPPING if (change, what) == ("moment", "norm") and in_16_bits else 0.0
        text = f"{CHANGES[change]} {what} at {point} weights"
        for group, members in _groups(tensors).items():
            plain_error = typical([known.get(name, 0.0) for name in members])
            limit = max(factor * max(plain_error, plain_typical), budget / 2) + rounded
            checks.append(_Check(f"{group}: median {text}", _median(tensors[name] for name in members), limit))
        for name, error in tensors.items():
            plain_error = max(known.get(name, 0.0), *plain_both)
            limit = max(ONE_TENSOR[what] * plain_error, budget) + rounded
            if what == "direction":
                limit = min(limit, max(UNRELATED, plain_error))
            checks.append(_Check(f"{name}: {text}", error, limit))
    return checks


def _budget(names: Sequence[str], change: str, what: str) -> float:
    """Return the largest limit in `BUDGETS` for an error of one tensor. Return 0 if `BUDGETS` has no fixed limit."""
    of_step = CHANGES[change] == "weight change"
    field = "norm" if what == "norm" else "update" if of_step else "direction"
    budgets = [getattr(BUDGETS[name], field) for name in names if of_step or name == names[0]]
    return max((each for each in budgets if each is not None), default=0.0)


def _errors(records: Sequence[Mapping[str, Any]], stochastic: bool = False) -> _Errors:
    """Return the direction error and the logarithm of the norm ratio of each tensor. `stochastic`: weights are rounded
    stochastically. The norm of a weight change is then larger, but the length of its part along the weight change of
    the reference is not. The logarithms of both ratios are errors, and the one closer to 0 counts."""
    errors: _Errors = {}
    rows = grouped_by([row for record in records for row in record["tensors"]], lambda row: tuple(row[:3]))
    for (point, change, name), same in rows.items():
        errors.setdefault((point, change, "direction"), {})[name] = _median(row[3] for row in same)
        norms = [row[4] for row in same]
        if stochastic and CHANGES[change] == "weight change":  # the cosine of the angle is 1 - direction**2 / 2
            norms = [min(row[4], row[4] + math.log(max(1 - row[3] ** 2 / 2, math.ulp(1))), key=abs) for row in same]
        errors.setdefault((point, change, "norm"), {})[name] = _root_mean_square(norms)
    return errors


def _groups(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = layer_of(name)
        for group in (EVERY, module_of(name), *([f"layer {layer}"] if layer else ())):
            groups.setdefault(group, []).append(name)
    return {group: members for group, members in groups.items() if len(members) > 2 or group == EVERY}


def _median(values: Iterable[float]) -> float:
    return statistics.median([*values] or [0.0])


def _root_mean_square(values: Iterable[float]) -> float:
    return math.sqrt(statistics.fmean([value**2 for value in values] or [0.0]))


def _rms(pair: Sequence[Sequence[float]]) -> float:
    return _root_mean_square(y - x for x, y in zip(*pair, strict=True))
