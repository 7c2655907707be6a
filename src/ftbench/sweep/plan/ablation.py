"""The plan of an ablation: all variants of the plain recipe with interleaved repeats, then a greedy selection.

The selection adds the variants that helped, the best one first, and keeps a variant if it helps again. Results are read
from the run directories, so a resumed ablation makes the same selection.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftbench.core.compare import Ratio
from ftbench.report.compare.pairs import Noise, Pair, noise_of, pair_of
from ftbench.report.data.axes import OPTIMIZATIONS
from ftbench.report.data.cells import Cell
from ftbench.report.data.collect import records
from ftbench.report.data.groups import cells_of, runs_of
from ftbench.spec import ablation
from ftbench.spec.ablation import PLAIN, Changes, Variant
from ftbench.spec.experiment import Experiment
from ftbench.spec.optimizations import Optimizations
from ftbench.store.summary import read_summary
from ftbench.sweep.plan.base import FAILED, Job, Options, Standing, job
from ftbench.sweep.plan.grid import Grid

OBJECTIVES = ("speed", "memory")  # real tokens/s; peak of allocated memory
MEMORY_GAIN = 0.005  # share of the peak that counts as a gain


@dataclass(frozen=True, slots=True)
class Start:
    """Start of an ablation.

    Attributes:
        spec: The resolved plain spec with its number of repeats.
        variants: The variants to test.
        objective: One of OBJECTIVES.
        refused: Returns why a spec cannot run on this machine, or None.
        optimizations: Optimizations of the original spec.
    """

    spec: Experiment
    variants: Sequence[Variant]
    objective: str
    refused: Callable[[Experiment], str | None]
    optimizations: Optimizations


@dataclass(frozen=True, slots=True)
class Combination:
    """A variant added to `over`. `reason` is why it was not kept or not tried."""

    variant: Variant
    changes: Changes
    over: Changes
    kept: bool = False
    reason: str = ""

    @property
    def name(self) -> str:
        return ablation.label(self.changes)


class AblationPlan(Grid):
    """The plan of an ablation. `combinations` are the tested ones in order, `best` are the settings kept so far."""

    def __init__(self, start: Start, options: Options) -> None:
        self.start, self.combinations, self.best = start, list[Combination](), dict[str, Any]()
        self.options = options
        self._selection: Iterator[list[Job]] | None = None
        self._cells: dict[str, Cell] = {}
        every = [(PLAIN, dict[str, Any]()), *((variant.name, variant.changes) for variant in start.variants)]
        reasons = {ablation.label(changes): self._refused(changes) for _, changes in every}
        self.refused = {name: reason for name, reason in reasons.items() if reason}
        allowed = [changes for name, changes in every if name not in self.refused]
        jobs = [self._job(changes, repeat) for repeat in range(1, self.repeats + 1) for changes in allowed]
        super().__init__(jobs, {}, options)
        self._skip_repeats()

    @property
    def repeats(self) -> int:
        return self.start.spec.measure.repeats

    @property
    def likely(self) -> bool:
        """Whether gains are only likely: one run per side does not show the noise between runs."""
        return self.repeats == 1 and self.start.objective == "speed"

    def _refused(self, changes: Changes) -> str | None:
        return self.start.refused(ablation.with_changes(self.start.spec, changes))

    def _job(self, changes: Changes, repeat: int) -> Job:
        spec, name = ablation.with_changes(self.start.spec, changes), ablation.label(changes)
        sets = (*self.options.sets, *ablation.settings(changes.items()))
        return job(spec, sets, {"variant": name}, repeat, self.options.folder, self.options.gpu)

    def jobs(self, changes: Changes) -> list[Job]:
        """Return the repeats of a combination."""
        return [self._job(changes, repeat) for repeat in range(1, self.repeats + 1)]

    def next(self, has_time: Callable[[Job], bool]) -> Job | None:
        while (job := super().next(has_time)) is None:
            if self.left():
                return None
            self._selection = self._selection or self._select()
            jobs = next(self._selection, None)
            if jobs is None:
                return None
            self.add(jobs, {})
            self._skip_repeats()
        return job

    def ended(self, job: Job) -> None:
        super().ended(job)
        self._cells.pop(job.cell, None)
        self._skip_repeats()

    def _skip_repeats(self) -> None:
        """Skip the other repeats of a failed run."""
        failed = {each.cell: each.repeat for each, now in self.standings.items() if now.state in FAILED}
        for each in self.pending():
            if each.cell in failed:
                self.standings[each] = Standing("skipped", f"repeat {failed[each.cell]} failed")

    def cell(self, changes: Changes) -> Cell | None:
        """Return the finished runs of a combination; None before the first one."""
        jobs = self.jobs(changes)
        name = jobs[0].cell
        if name not in self._cells:
            ran = [each for each in jobs if (now := self.standings.get(each)) and now.done and now.state != "skipped"]
            if not ran:
                return None
            rows = records(read_summary(each.run) | {"path": str(each.run.path)} for each in ran)
            self._cells[name] = cells_of(runs_of(rows))[-1]  # the newest, if the tokens have changed
        return self._cells[name]

    def state(self, changes: Changes) -> str:
        """Return the state of a combination's first run if no run has a result, else an empty string."""
        standings = [self.standings.get(each) for each in self.jobs(changes)]
        if any(now and now.state == "ok" for now in standings):
            cell = self.cell(changes)
            return cell.state if cell and not cell.ok else ""
        return next((f"{now.state}: {now.reason}" if now.reason else now.state for now in standings if now), "not run")

    def pair(self, changes: Changes, over: Changes) -> Pair | None:
        """Return a combination compared with another one; None before both have run."""
        cell, baseline = self.cell(changes), self.cell(over)
        return pair_of(OPTIMIZATIONS, cell, baseline, noise=self._noise()) if cell and baseline else None

    def _noise(self) -> Noise:
        """Return the noise between equal runs, corrected for the number of variants: 1 of 20 would help by chance."""
        variants = [variant.changes for variant in self.start.variants if variant.name not in self.refused]
        cells = [cell for changes in ({}, *variants) if (cell := self.cell(changes)) is not None]
        return noise_of(cells, max(1, len(variants)), sittings=False)  # an ablation is one sitting

    def over(self, variant: Variant) -> Changes:
        """Return the settings that a variant is compared with."""
        return next((other.changes for other in self.start.variants if other.name == variant.over), {})

    def hindrance(self, changes: Changes, over: Changes) -> str:
        """Return why a combination is not better than another one, or an empty string."""
        pair = self.pair(changes, over)
        for each in (self.pair(changes, {}), pair):
            if each and each.learning and each.learning.failed:
                return f"does not learn the same: {each.learning.reason}"
        if pair is None or not pair.cell.ok or pair.baseline is None or not pair.baseline.ok:
            return self.state(changes) or f"nothing to compare with: {self.state(over) or 'not run'}"
        if pair.reason and self.start.objective == "speed":
            return f"{pair.reason}: run it again without other programs, with --force"
        return _shortfall(getattr(pair, self.start.objective), self.start.objective)

    def helpful(self) -> list[Variant]:
        """Return the variants that help, compared with plain and with what they require; the best first."""
        alone = [
            variant
            for variant in self.start.variants
            if variant.name not in self.refused
            and not self.hindrance(variant.changes, {})
            and (variant.over == PLAIN or not self.hindrance(variant.changes, self.over(variant)))
        ]
        return sorted(alone, key=lambda variant: self._gain(variant), reverse=True)

    def _gain(self, variant: Variant) -> float:
        pair = self.pair(variant.changes, {})
        ratio: Ratio | None = getattr(pair, self.start.objective) if pair else None
        return 0.0 if ratio is None else ratio.value if self.start.objective == "speed" else 1 / ratio.value

    def _select(self) -> Iterator[list[Job]]:
        """Yield the jobs of each combination. They must run before the next one is requested.

        A variant that did not help is tested once more with all that was kept later, unless it only changes a kept
        value.
        """
        variants = self.helpful()
        for variant in variants:
            yield from self._try(variant)
        for variant in variants:
            if not ablation.merged(self.best, variant).keys() <= self.best.keys():
                yield from self._try(variant)

    def _try(self, variant: Variant) -> Iterator[list[Job]]:
        changes = ablation.merged(self.best, variant)
        if changes == self.best or any(each.changes == changes for each in self.combinations):
            return
        combination = Combination(variant, changes, dict(self.best))
        if refused := self._refused(changes):
            self.combinations.append(replace(combination, reason=refused))
            return
        yield self.jobs(changes)
        reason = self.hindrance(changes, self.best)
        self.combinations.append(replace(combination, kept=not reason, reason=reason))
        if not reason:
            self.best = changes


def _shortfall(ratio: Ratio | None, objective: str) -> str:
    """Return why a ratio is not a gain beyond noise, or an empty string.

    A peak of a single run has no interval and is used directly, because peaks are reproducible.
    """
    if ratio is None:
        return "not known"
    if objective == "memory":
        gains = ratio.value <= 1 - MEMORY_GAIN and (ratio.direction or ratio.verdict) in ("lower", "unknown")
        return "" if gains else "not smaller"
    words = {"higher": "", "lower": "slower", "unknown": "inconclusive: use more steps or repeats"}
    return words.get(ratio.direction or ratio.verdict, ratio.verdict)
