"""`ftbench sweep`: the command line → a plan, the GPU slots to run it in, and one sitting of it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.errors import MissingError, SpecError
from ftbench.launch import runner
from ftbench.spec.ablation import settings
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.resolve import require_published
from ftbench.spec.sweep import GridCell, cells
from ftbench.store.rundir import first_gpu
from ftbench.sweep.execute.gpu_slots import GpuSlot, local_slots
from ftbench.sweep.execute.journal import JOURNAL, Journal, locked
from ftbench.sweep.execute.loop import Sitting
from ftbench.sweep.jobs import short
from ftbench.sweep.output import view
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan import budget
from ftbench.sweep.plan.base import Plan, PlanRequest
from ftbench.sweep.plan.grid import Grid, first_jobs, with_repeats
from ftbench.sweep.plan.search import Family, Search

TRIAL_STEPS = 7
_BATCH = ("train.batch_size", "train.gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True)
class SweepRequest(PlanRequest):
    """The command line of a sweep. `axes` are `key=value,value`; `gpus` as --gpus lists them; `on` names a cluster."""

    axes: Sequence[str] = ()
    until_oom: bool = False
    trial_steps: int | None = None
    effective_batch: int | None = None
    gpus: Sequence[str] = ()
    on: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A plan that can be started. `device` is the GPU of machine.json; `impossible` are the cells that can be on no
    machine, with the reason; `tables` makes what is written after each run."""

    request: PlanRequest
    source: bytes
    plan: Plan
    slots: Sequence[GpuSlot]
    device: dict[str, Any] | None
    impossible: Sequence[tuple[str, str]]
    tables: Callable[..., Tables] = Tables


def prepare(request: SweepRequest, stack: ExitStack, say: Callable[[str], None] = lambda text: None) -> Ready:
    """Plan without starting anything, but for a connection to a cluster, which `stack` closes. `say` hears of what does
    nothing, and of what is waited for. Raise SpecError and MissingError for what is wrong or not there."""
    if request.effective_batch and not request.until_oom:
        raise SpecError("--effective-batch goes with --until-oom; elsewhere set train.gradient_accumulation_steps")
    if request.trial_steps and not request.until_oom:
        raise SpecError("--trial-steps goes with --until-oom; elsewhere set train.max_steps")
    if request.gpus and request.on:
        raise SpecError(f"--gpus names those of this machine, and --on {request.on} runs elsewhere: give one of them")
    grid = cells(request.spec, request.sets, request.axes)
    name = _experiment(grid)
    runner.check_disk(request.out)
    widest = max((cell.spec for cell in grid if cell.spec is not None), key=lambda spec: spec.launch.gpus)
    folder = request.out / name
    slots, described = _slots(request, widest, folder, stack, say)
    planner = _Planner(request, grid, described, folder)
    for sentence in planner.duplicates():
        say(sentence)
    refused = [(" ".join(f"{key}={short(value)}" for key, value in cell.values.items()), cell.refused)
               for cell in grid if cell.refused]  # fmt: skip
    return Ready(request, request.spec.read_bytes(), planner.plan(), slots, planner.device, refused)


def _experiment(grid: Sequence[GridCell]) -> str:
    """Return the folder of all cells. Raise SpecError where no cell can work, or some pretend."""
    folders = {runner.experiment(cell.spec) for cell in grid if cell.spec is not None}
    if not folders:
        raise SpecError(*dict.fromkeys(f"no cell can work: {cell.refused}" for cell in grid))
    if len(folders) > 1:
        raise SpecError("launch.mock: a sweep is a mock as a whole or not at all; make off a sweep of its own")
    return folders.pop()


def _slots(
    request: SweepRequest, spec: Experiment, folder: Path, stack: ExitStack, say: Callable[[str], None]
) -> tuple[Sequence[GpuSlot], dict[str, Any]]:
    """Return where to run, and the machine.json of a slot: all are of one kind."""
    if request.on is None:
        slots = local_slots(request.gpus, mock=spec.launch.mock != "off")
        return slots, runner.describe(spec, slots[0].visible)
    kind = request.on.partition(":")[0]
    if kind == "slurm":
        from ftbench.sweep.execute import slurm_slots

        return slurm_slots.cluster_slots(request.on, spec, request.spec, folder, stack, say)
    from ftbench.sweep.execute import ray_slots

    return ray_slots.cluster_slots(request.on, spec, stack)


class _Planner:
    """The cells of a sweep on the machine that is described → a plan."""

    def __init__(
        self, request: SweepRequest, grid: Sequence[GridCell], described: dict[str, Any], folder: Path
    ) -> None:
        self.request, self.described, self.cells = request, described, len(grid)
        capability = runner.capability(described)
        for spec in (cell.spec for cell in grid if cell.spec is not None and cell.spec.launch.mock == "off"):
            require_published(spec, capability)
        grid = [cell if cell.spec is None else replace(cell, spec=resolve(cell.spec, capability)) for cell in grid]
        self.device = first_gpu(described) or None
        self.options = request.options(folder, runner.gpu_name(described), request.sets)
        self.firsts = first_jobs(grid, self.options)

    def plan(self) -> Plan:
        return self._search() if self.request.until_oom else self._grid()

    def _refused(self, spec: Experiment) -> str | None:
        """Return why a spec cannot work on this machine. Raise what `runner.check_needed` raises."""
        problems = runner.refused(spec, self.described)
        if not problems:
            runner.check_needed(spec)
        return "; ".join(problems) or None

    def duplicates(self) -> Iterator[str]:
        """Yield a sentence on cells that make no run of their own: what they differ in changes no result."""
        first: dict[str, dict[str, Any]] = {}
        keys, count, same = dict[str, None](), 0, 0
        for job in self.firsts:
            values = _without_batch(job.values) if self.request.until_oom else job.values
            others = first.setdefault(job.family if self.request.until_oom else job.cell, values)
            differing = [key for key, value in values.items() if value != others[key]]
            count += differing not in ([], ["measure.repeats"])
            same += not (differing or values is others or self.request.until_oom)
            keys |= dict.fromkeys(differing)
        if count:
            yield f"cells that are the run of another but for {', '.join(keys)} run once: {count} of {self.cells}"
        if same:
            yield f"cells that stand there twice run once: {same} of {self.cells}"

    def _grid(self) -> Grid:
        jobs = with_repeats(self.firsts)
        if self.request.time_budget is not None:
            jobs = budget.coarse_to_fine(jobs)
        reasons = {job: reason for job in jobs if (reason := self._refused(job.spec)) is not None}
        if len(reasons) == len(jobs):
            raise MissingError("\n".join(dict.fromkeys(reasons.values())))
        return Grid(jobs, reasons, self.options)

    def _search(self) -> Search:
        families: dict[str, Family] = {}
        for job in self.firsts:
            if job.family not in families:
                values = _without_batch(job.values)
                sets = (*self.request.sets, *settings(values.items()))
                families[job.family] = Family(job.spec, sets, values, self._refused(job.spec))
        if all(family.refused for family in families.values()):
            raise MissingError("\n".join(dict.fromkeys(family.refused or "" for family in families.values())))
        if self.options.gpu is None:
            raise MissingError(
                "--until-oom needs a GPU: a CPU's memory ends in swapping, not in an answer (`--set launch.mock=oom` "
                "tries the search without one)"
            )
        request = self.request
        steps = request.trial_steps or TRIAL_STEPS
        return Search(families.values(), self.options, steps, request.effective_batch, self.device)


def _without_batch(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _BATCH}


def run(ready: Ready, log_every_s: float | None = None) -> tuple[int, Tables]:
    """Run one sitting and return its exit code and the tables; they are in the folder and stay there. Off a terminal
    say every `log_every_s` seconds what is on."""
    plan, folder, limit = ready.plan, ready.plan.options.folder, ready.request.limit_s
    deadline = None if limit is None else time.monotonic() + limit
    with locked(folder), view.LiveView(log_every_s) as shown:
        journal = Journal(folder / JOURNAL)
        tables = ready.tables(plan, ready.impossible)
        about = {"spec": ready.request.spec.name, "gpu": plan.options.gpu, "until_oom": isinstance(plan, Search)}
        shown.event(f"{folder}: {view.counted(plan.standings.values(), None) or 'searching'}")
        for cell, reason in ready.impossible:
            shown.event(f"cannot work  {cell}: {reason}")
        sitting = Sitting(ready.source, plan, ready.slots, tables, journal, shown, deadline, about)
        try:
            return tables.exit_code(sitting.run()), tables
        finally:
            if left := plan.left():
                shown.event(f"{units.some(left, 'run')} left; the same command goes on with them")
            journal.close()
