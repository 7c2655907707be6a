"""The plan of a parity check: a reference recipe, the recipes held against it, and controls, over several seeds; and
what the runs say together. What a run says is read from its directory alone."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ftbench.core import units
from ftbench.core.learning import (
    CANNOT_TELL,
    DIFFERS,
    FOLLOWS,
    NOT_FINITE,
    Learning,
    TrainedStep,
    learning_verdict,
    mean_loss,
)
from ftbench.report.data.facts import spec_facts
from ftbench.spec.ablation import with_changes
from ftbench.spec.experiment import Experiment
from ftbench.spec.optimizations import tolerance
from ftbench.spec.optimizations.declaration import ROUNDING
from ftbench.store.rundir import NOT_FINITE as STATE_NOT_FINITE
from ftbench.store.rundir import RunDir, read_json
from ftbench.store.steps import read_steps
from ftbench.sweep.jobs import Job, job
from ftbench.sweep.plan.base import Options
from ftbench.sweep.plan.grid import Grid

CONTROLS = ("learning_rate_0", "reversed_gradient", "random_labels")
FAILED, PENDING = "failed", "not run yet"


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to train: its name, the resolved spec, the `--set`s that make it, and why it cannot run here, if so."""

    name: str
    spec: Experiment
    sets: tuple[str, ...]
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a recipe, or a control, has come to. `seeds` are the verdicts seed by seed; `held_out` the signed relative
    differences of the held-out losses; `tolerance` is the share that losses may differ by."""

    name: str
    verdict: str
    reason: str = ""
    tolerance: float | None = None
    seeds: Sequence[Learning] = ()
    held_out: Sequence[float] = ()

    def record(self) -> dict[str, Any]:
        """Return all of it as plain values, with the figures of the seed that differs most (`learned`: of the one with
        which the reference learned least); what is unknown, or no number, is None."""
        known = {name: [x for seed in self.seeds if (x := _finite(getattr(seed, name))) is not None]
                 for name in ("change", "learned", "grad_norm")}  # fmt: skip
        held_out = list(map(_finite, self.held_out))
        return {
            "name": self.name, "verdict": self.verdict, "reason": self.reason or None, "tolerance": self.tolerance,
            "change": max(known["change"], key=abs, default=None),
            "held_out_change": max((x for x in held_out if x is not None), key=abs, default=None),
            "learned": min(known["learned"], default=None),
            "grad_norm_change": max(known["grad_norm"], key=abs, default=None),
            "seeds": [{key: _finite(value) for key, value in asdict(seed).items()} for seed in self.seeds],
            "held_out_changes": held_out,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SeedSpread:
    """How far seeds of the reference lie apart: highest over lowest mean loss, less one, in training and held out."""

    train: float
    held_out: float


@dataclass(frozen=True, slots=True)
class _Losses:
    """What a run says about learning: its steps, the held-out loss, and a hash of the tokens in their order."""

    steps: list[TrainedStep] = field(default_factory=list)
    held_out: float | None = None
    order: str | None = None


class ParityPlan(Grid):
    """`reference` and `recipes` once a seed, and the controls, which train the reference spoiled, with the first seed.
    Seeds are those of the adapters and of dropout, on the same data in the same order; full fine-tuning has neither and
    gets other data with each."""

    def __init__(
        self, reference: Contender, recipes: Sequence[Contender], seeds: int, gradients: int, options: Options
    ) -> None:
        self.reference, self.recipes, self.count = reference, recipes, seeds
        self.options, self.gradients = options, gradients
        self._read: dict[Job, _Losses] = {}
        able = [recipe for recipe in (reference, *recipes) if not recipe.refused]
        first, *others = ([self.job(recipe, seed) for recipe in able] for seed in range(seeds))
        controls = [self.control(name) for name in CONTROLS]
        super().__init__([*first, *controls, *itertools.chain(*others)], {}, options)

    def job(self, recipe: Contender, seed: int) -> Job:
        """Return the run of a recipe with the seed of this number, from 0."""
        changes = _seeds(recipe.spec, seed) | ({"measure.gradients": self.gradients} if not seed else {})
        return self._job(recipe, changes, {"recipe": recipe.name, "seed": seed + 1})

    def control(self, name: str) -> Job:
        """Return the run that trains the reference spoiled."""
        changes = _seeds(self.reference.spec, 0) | {"measure.control": name}
        return self._job(self.reference, changes, {"recipe": f"control: {name.replace('_', ' ')}", "seed": 1})

    def _job(self, recipe: Contender, changes: Mapping[str, Any], values: dict[str, Any]) -> Job:
        sets = (*recipe.sets, *(f"{key}={value}" for key, value in changes.items()))
        return job(with_changes(recipe.spec, changes), sets, values, 1, self.options.folder, self.options.gpu)

    def spread(self) -> SeedSpread | None:
        """Return how far the reference's seeds lie apart; None before all have ended well."""
        runs = [self._losses(self.job(self.reference, seed)) for seed in range(self.count)]
        means = [mean_loss(run.steps) or math.nan for run in runs]
        held_out = [run.held_out or math.nan for run in runs]
        if not all(map(math.isfinite, (*means, *held_out))):
            return None
        return SeedSpread(max(means) / min(means) - 1, max(held_out) / min(held_out) - 1)

    def judgements(self) -> list[Judgement]:
        """Return what each recipe has come to."""
        return [self._judged_recipe(recipe) for recipe in self.recipes]

    def controls(self) -> list[Judgement]:
        """Return what each control has come to, by the widest tolerance of the recipes: FOLLOWS and CANNOT_TELL mean
        that the check would have passed a run that learned nothing."""
        share = max([each.tolerance for each in self.judgements() if each.tolerance], default=ROUNDING)
        return [self._judged(name, [self.control(name)], share) for name in CONTROLS]

    def passed(self) -> bool:
        """Return whether every recipe follows, and every control was caught."""
        return all(each.verdict == FOLLOWS for each in self.judgements()) and all(map(caught, self.controls()))

    def same_steps(self, recipe: Contender) -> bool:
        """Return whether step i of a recipe's first run held the samples of step i of the reference's."""
        return _same_steps(*(self._losses(self.job(each, 0)) for each in (self.reference, recipe)))

    def _judged_recipe(self, recipe: Contender) -> Judgement:
        if recipe.refused:
            return Judgement(recipe.name, FAILED, recipe.refused)
        jobs = [self.job(recipe, seed) for seed in range(self.count)]
        share = tolerance(*(spec_facts(each.run) for each in (self.job(self.reference, 0), jobs[0]))).share
        return self._judged(recipe.name, jobs, share)

    def _judged(self, name: str, jobs: Sequence[Job], share: float) -> Judgement:
        references = [self.job(self.reference, seed) for seed in range(len(jobs))]
        for each in (*jobs, *references):
            standing = self.standings[each]
            if not standing.done:
                return Judgement(name, PENDING)
            if standing.state == STATE_NOT_FINITE:
                return Judgement(name, NOT_FINITE, f"{each.what}: {standing.reason}")
            if standing.state != "ok":
                return Judgement(name, FAILED, f"{each.what}: {standing.reason or standing.state}")
        if not all(self.standings[self.job(self.reference, seed)].done for seed in range(self.count)):
            return Judgement(name, PENDING)  # a control is held against how far the reference's seeds lie apart
        spread = self.spread()
        if spread is None:
            return Judgement(name, CANNOT_TELL, "the reference has no finite loss with every seed", share)
        pairs = [(self._losses(a), self._losses(b)) for a, b in zip(references, jobs, strict=True)]
        seeds = [learning_verdict(a.steps, b.steps, share, paired=_same_steps(a, b)) for a, b in pairs]
        held_out = [b.held_out / a.held_out - 1 for a, b in pairs if a.held_out and b.held_out is not None]
        return Judgement(name, *_together(seeds, held_out, share, spread), share, seeds, held_out)

    def _losses(self, each: Job) -> _Losses:
        """Return what a run that ended well says; nothing of any other."""
        if self.standings[each].state != "ok":
            return _Losses()
        return self._read.setdefault(each, self._read.get(each) or _read(each.run))


def caught(control: Judgement) -> bool:
    """Return whether the check has noticed that a control does not learn."""
    return control.verdict in (DIFFERS, NOT_FINITE)


def _together(
    seeds: Sequence[Learning], held_out: Sequence[float], share: float, spread: SeedSpread
) -> tuple[str, str]:
    """Return the verdict over all seeds, and why: the worst that a seed gives, the held-out loss by the same share. A
    difference that seeds of the reference have among themselves proves nothing, and neither does a reference that has
    learned less than that."""
    broken = [seed for seed in seeds if seed.verdict == NOT_FINITE]
    if broken or not all(map(math.isfinite, held_out)):
        return NOT_FINITE, broken[0].reason if broken else "its held-out loss is not a number"
    outside = [seed.reason for seed in seeds if seed.verdict == DIFFERS]
    outside += [f"its held-out loss differs by {units.difference(x)}" for x in held_out if abs(x) > share]
    if outside:
        trained = max((abs(seed.change or 0.0) for seed in seeds), default=0.0)
        if trained <= spread.train and max(map(abs, held_out), default=0.0) <= spread.held_out:
            return CANNOT_TELL, f"{outside[0]}; seeds of the reference differ by {spread.train * 100:.2g} % themselves"
        return DIFFERS, outside[0]
    unknown = [seed.reason for seed in seeds if seed.verdict == CANNOT_TELL]
    if not unknown and not held_out:
        unknown = ["nothing was held out"]
    if not unknown and min(seed.learned or 0.0 for seed in seeds) <= spread.train:
        unknown = [f"the reference learned no more than its seeds differ by ({spread.train * 100:.2g} %)"]
    return (CANNOT_TELL, unknown[0]) if unknown else (FOLLOWS, "")


def _seeds(spec: Experiment, number: int) -> dict[str, Any]:
    changes = {"train.seed": spec.train.seed + number}
    if spec.method.name == "unsloth":  # which draws its adapters with a seed of its own
        changes["method.random_state"] = spec.method.random_state + number
    return changes | ({"dataset.seed": spec.dataset.seed + number} if spec.method.name == "full" else {})


def _read(run: RunDir) -> _Losses:
    rows = read_steps(run.steps)[0]
    steps = [
        TrainedStep(row.step, row.samples, row.label_tokens, row.loss, row.grad_norm)
        for row in rows if row.phase == "train" and row.step is not None
    ]  # fmt: skip
    held_out = [row.loss for row in rows if row.phase == "evaluate"]
    order = (read_json(run.applied).get("dataset") or {}).get("order_hash")
    return _Losses(steps, held_out[-1] if held_out else None, order)


def _same_steps(reference: _Losses, candidate: _Losses) -> bool:
    """Return whether step i of both trained on the same samples."""
    samples = [[step.samples for step in side.steps] for side in (reference, candidate)]
    return reference.order is not None and reference.order == candidate.order and samples[0] == samples[1]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
