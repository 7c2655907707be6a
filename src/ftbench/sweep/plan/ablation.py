"""The plan of an ablation: every rung on the plain recipe, repeats interleaved, and then the climb, which puts together
what helped, the most helpful first, and keeps what helps further. What a run says is read from its directory alone, so
that the climb goes the same way again when the ablation is resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftbench.core.compare import Ratio
from ftbench.report.compare.pairs import Pair, pair_of
from ftbench.report.data.collect import frame_of, summary_of
from ftbench.report.data.facts import OPTIMIZATIONS
from ftbench.report.data.groups import Cell, cells_of, runs_of
from ftbench.spec import ablation
from ftbench.spec.ablation import PLAIN, Changes, Variant
from ftbench.spec.experiment import Experiment
from ftbench.sweep.jobs import FAILED, Job, Standing, job
from ftbench.sweep.plan.grid import Grid, Options

OBJECTIVES = ("speed", "memory")  # real tokens a second; the peak of allocated memory
MEMORY_GAIN = 0.005  # of the peak: repeats agree to more digits than matter


@dataclass(frozen=True, slots=True)
class Start:
    """What the rungs stand on: the plain spec, resolved and with its number of repeats; `refused` says why a spec can
    not run here; `objective` is one of OBJECTIVES."""

    spec: Experiment
    variants: Sequence[Variant]
    objective: str
    refused: Callable[[Experiment], str | None]


@dataclass(frozen=True, slots=True)
class Climb:
    """One combination that was tried on top of `over` because `rung` had helped alone; `reason` says why it was not
    kept, or could not be tried."""

    rung: Variant
    changes: Changes
    over: Changes
    kept: bool = False
    reason: str = ""

    @property
    def name(self) -> str:
        return ablation.label(self.changes)


class Ladder(Grid):
    """`climbs` are the combinations tried so far, in order; `best` what has been kept of them."""

    def __init__(self, start: Start, options: Options) -> None:
        self.start, self.climbs, self.best = start, list[Climb](), dict[str, Any]()
        self._folder, self._gpu, self._sets = options.folder, options.gpu, options.sets
        self._climbing: Iterator[list[Job]] | None = None
        self._cells: dict[str, Cell] = {}
        every = [(PLAIN, dict[str, Any]()), *((rung.name, rung.changes) for rung in start.variants)]
        reasons = {ablation.label(changes): self._refused(changes) for _, changes in every}
        self.refused = {name: reason for name, reason in reasons.items() if reason}
        tried = [changes for name, changes in every if name not in self.refused]
        jobs = [self._job(changes, repeat) for repeat in range(1, self.repeats + 1) for changes in tried]
        super().__init__(jobs, {}, options)
        self._skip_repeats()

    @property
    def repeats(self) -> int:
        return self.start.spec.measure.repeats

    def _refused(self, changes: Changes) -> str | None:
        return self.start.refused(ablation.with_changes(self.start.spec, changes))

    def _job(self, changes: Changes, repeat: int) -> Job:
        spec, name = ablation.with_changes(self.start.spec, changes), ablation.label(changes)
        sets = (*self._sets, *ablation.settings(changes.items()))
        return job(spec, sets, {"rung": name}, repeat, self._folder, self._gpu)

    def jobs(self, changes: Changes) -> list[Job]:
        """The repeats of a combination."""
        return [self._job(changes, repeat) for repeat in range(1, self.repeats + 1)]

    def next(self, fits: Callable[[Job], bool]) -> Job | None:
        while (found := super().next(fits)) is None:
            if any(not now.done for now in self.standings.values()):
                return None
            self._climbing = self._climbing or self._climb()
            more = next(self._climbing, None)
            if more is None:
                return None
            self.add(more, {})
            self._skip_repeats()
        return found

    def ended(self, job: Job) -> None:
        super().ended(job)
        self._cells.pop(job.cell, None)
        self._skip_repeats()

    def _skip_repeats(self) -> None:
        """What has failed once is not run again to fail again."""
        failed = {each.cell: each.repeat for each, now in self.standings.items() if now.state in FAILED}
        for each in self.pending():
            if each.cell in failed:
                self.standings[each] = Standing("skipped", f"repeat {failed[each.cell]} failed")

    # --- figures -----------------------------------------------------------------------------------------------------

    def cell(self, changes: Changes) -> Cell | None:
        """The runs of a combination that have ended; None before the first has."""
        jobs = self.jobs(changes)
        name = jobs[0].cell
        if name not in self._cells:
            ran = [each for each in jobs if (now := self.standings.get(each)) and now.done and now.state != "skipped"]
            if not ran:
                return None
            frame = frame_of(summary_of(each.run) | {"path": str(each.run.path)} for each in ran)
            (self._cells[name],) = cells_of(runs_of(frame))
        return self._cells[name]

    def state(self, changes: Changes) -> str:
        """How its first run stands, if none has ended well; else empty."""
        found = [self.standings.get(each) for each in self.jobs(changes)]
        if any(now and now.state == "ok" for now in found):
            return ""
        return next((f"{now.state}: {now.reason}" if now.reason else now.state for now in found if now), "not run")

    def pair(self, changes: Changes, over: Changes) -> Pair | None:
        """A combination beside another; None before both have run."""
        cell, baseline = self.cell(changes), self.cell(over)
        return pair_of(OPTIMIZATIONS, cell, baseline) if cell and baseline else None

    def over(self, rung: Variant) -> Changes:
        """What a rung is held against."""
        return next((other.changes for other in self.start.variants if other.name == rung.over), {})

    def hindrance(self, changes: Changes, over: Changes) -> str:
        """Why a combination is no gain over another; empty where it is one."""
        pair = self.pair(changes, over)
        if pair is None or not pair.cell.ok or pair.baseline is None or not pair.baseline.ok:
            return self.state(changes) or "nothing to hold it against"
        plain = self.pair(changes, {})
        if plain and plain.parity and plain.parity.verdict == "outside" and plain.parity.step is not None:
            return "does not learn the same"
        return _shortfall(getattr(pair, self.start.objective), self.start.objective)

    # --- the climb ---------------------------------------------------------------------------------------------------

    def helpful(self) -> list[Variant]:
        """The rungs that help alone, both against the plain recipe and against what they need beside them; the most
        helpful first."""
        alone = [
            rung
            for rung in self.start.variants
            if rung.name not in self.refused
            and not self.hindrance(rung.changes, {})
            and (rung.over == PLAIN or not self.hindrance(rung.changes, self.over(rung)))
        ]
        return sorted(alone, key=lambda rung: self._gain(rung), reverse=True)

    def _gain(self, rung: Variant) -> float:
        pair = self.pair(rung.changes, {})
        ratio: Ratio | None = getattr(pair, self.start.objective) if pair else None
        return 0.0 if ratio is None else ratio.value if self.start.objective == "speed" else 1 / ratio.value

    def _climb(self) -> Iterator[list[Job]]:
        """Gives the jobs of one combination after the other, each to be run before the next is asked for. What did not
        help at first is tried once more on top of what was kept since, but for another value of what was kept."""
        rungs = self.helpful()
        for rung in rungs:
            yield from self._try(rung)
        for rung in rungs:
            if not ablation.merged(self.best, rung).keys() <= self.best.keys():
                yield from self._try(rung)

    def _try(self, rung: Variant) -> Iterator[list[Job]]:
        changes = ablation.merged(self.best, rung)
        if changes == self.best or any(climb.changes == changes for climb in self.climbs):
            return
        tried = Climb(rung, changes, dict(self.best))
        if refused := self._refused(changes):
            self.climbs.append(replace(tried, reason=refused))
            return
        yield self.jobs(changes)
        reason = self.hindrance(changes, self.best)
        self.climbs.append(replace(tried, kept=not reason, reason=reason))
        if not reason:
            self.best = changes


def _shortfall(ratio: Ratio | None, objective: str) -> str:
    """Why a difference is no gain that can be told from noise; empty where it is one. A peak without an interval, of
    one run, is taken as it is: it repeats."""
    if ratio is None:
        return "not known"
    if objective == "memory":
        gains = ratio.value <= 1 - MEMORY_GAIN and ratio.verdict in ("lower", "unknown")
        return "" if gains else "no smaller"
    words = {"higher": "", "lower": "slower", "unknown": "too few steps to tell: give it more, or repeats"}
    return words.get(ratio.verdict, ratio.verdict)
