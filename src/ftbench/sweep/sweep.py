"""`ftbench sweep`: plan the jobs of a command line, find the GPUs, and run the jobs."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.errors import MissingError, SpecError
from ftbench.launch import checks, runner
from ftbench.launch.live import LiveView
from ftbench.spec.ablation import settings, with_changes
from ftbench.spec.base import Capability
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.identity import fingerprint_without_batch
from ftbench.spec.incompatibilities import KERNELS, unpublished
from ftbench.spec.model_argument import spec_text
from ftbench.spec.sweep import GridCell, cells
from ftbench.store.rundir import first_gpu
from ftbench.sweep.gpu_slots import GpuSlot, local_slots
from ftbench.sweep.lock import locked
from ftbench.sweep.loop import Session
from ftbench.sweep.output import status
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan.base import Job, Options, Plan, PlanRequest, short
from ftbench.sweep.plan.grid import Grid, first_jobs, with_repeats
from ftbench.sweep.plan.search import TRIAL, Search, SearchCell

_SEARCHED = ("train.batch_size", "train.gradient_accumulation_steps", *TRIAL)  # the keys that --until-oom sets


@dataclass(frozen=True, kw_only=True)
class SweepRequest(PlanRequest):
    """Options of `ftbench sweep`. An axis is `key=value,value`. `gpus` has the --gpu-ids. `on` is the value of --on."""

    axes: Sequence[str] = ()
    until_oom: bool = False
    gpus: Sequence[str] = ()
    on: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A plan that is ready to start.

    Attributes:
        source: Content of the spec file.
        plan: Decides which job runs next.
        slots: The GPUs to use.
        device: The GPU, as in machine.json.
        impossible: Cells that no machine can run: (name, reason).
        unpublished: Why some recipes would run without their published kernels. If set, `run` raises MissingError.
        tables: Class of the tables that the sweep writes after each run.
    """

    request: PlanRequest
    source: bytes
    plan: Plan
    slots: Sequence[GpuSlot]
    device: dict[str, Any] | None
    impossible: Sequence[tuple[str, str]]
    unpublished: str | None = None
    tables: Callable[..., Tables] = Tables


def prepare(request: SweepRequest, notify: Callable[[str], None] = lambda text: None) -> Ready:
    """Plan a sweep without starting runs. Raise SpecError or MissingError if the sweep cannot run. `notify` displays
    notes, for example about duplicate cells."""
    if request.gpus and request.on:
        raise SpecError(f"--gpu-ids selects GPUs of this machine and --on {request.on} a cluster: use one of them")
    grid = cells(request.spec, request.sets, request.axes)
    folder = request.out / _experiment(grid)
    checks.check_disk(request.out)
    widest = max((cell.spec for cell in grid if cell.spec is not None), key=lambda spec: spec.launch.gpus)
    slots, machine = _slots(request, widest, folder, notify)
    capability = checks.capability(machine)
    options = request.options(folder, runner.gpu_name(machine), request.sets)
    resolved = [replace(cell, spec=resolve(cell.spec, capability)) for cell in grid if cell.spec is not None]
    firsts = first_jobs(resolved, options)
    if equal := len(firsts) - len({(job.cell, job.spec.measure.repeats) for job in firsts}):
        notify(f"{equal} of {len(grid)} cells equal another one, except for settings without effect: they run once")
    if request.until_oom and (ignored := [key for key in grid[0].values if key in _SEARCHED]):
        notify(f"--until-oom searches for the largest batch: it ignores the values of {' and '.join(ignored)}")
    impossible = [(cell_name(cell), cell.refused) for cell in grid if cell.refused]
    specs = ((cell_name(cell), cell.spec) for cell in grid if cell.spec is not None)
    fix = f"To sweep without the kernels, add --axis {KERNELS}=off"
    error = without_kernels(specs, capability, fix)
    if request.until_oom:
        plan: Plan = _search(request, firsts, machine, options)
    else:
        jobs = with_repeats(firsts)
        reasons = {job: reason for job in jobs if (reason := _problem(request, job.spec, machine)) is not None}
        plan = Grid(jobs, reasons, options)
    return Ready(request, spec_text(request.spec), plan, slots, first_gpu(machine) or None, impossible, error)


def cell_name(cell: GridCell) -> str:
    return " ".join(f"{key}={short(value)}" for key, value in cell.values.items())


def without_kernels(specs: Iterable[tuple[str, Experiment]], capability: Capability, fix: str) -> str | None:
    """Return an error message if specs would run without the published kernels of their recipe, else None. `specs` has
    pairs (name, spec). `fix` is a sentence about how to run them without the kernels."""
    reasons = ((name, unpublished(spec, capability)) for name, spec in specs if spec.launch.mock == "off")
    affected = [(name, why) for name, why in reasons if why]
    if not affected:
        return None
    names = units.listed([name for name, _ in affected if name], 6)
    return f"{names}{names and ': '}{affected[0][1]}. {fix}"


def _experiment(grid: Sequence[GridCell]) -> str:
    """Return the name of the experiment's folder. Raise SpecError without valid cells, or if only some are mocks."""
    folders = {runner.experiment(cell.spec) for cell in grid if cell.spec is not None}
    if not folders:
        raise SpecError(*dict.fromkeys(f"no cell can run: {cell.refused}" for cell in grid))
    if len(folders) > 1:
        raise SpecError("launch.mock: a sweep cannot mix mock runs and real runs; start two sweeps")
    return folders.pop()


def _slots(
    request: SweepRequest, spec: Experiment, folder: Path, notify: Callable[[str], None]
) -> tuple[Sequence[GpuSlot], dict[str, Any]]:
    """Return the GPU slots, and the content of machine.json for the first slot. All slots have the same kind of GPU."""
    if request.on is None:
        slots = local_slots(request.gpus, mock=spec.launch.mock != "off")
        return slots, runner.describe(spec, slots[0].visible)
    if request.on.partition(":")[0] == "slurm":
        from ftbench.cluster import slurm

        return slurm.slots(request.on, spec, request.spec, folder, notify)
    from ftbench.cluster import ray

    return ray.slots(request.on, spec)


def _problem(request: SweepRequest, spec: Experiment, machine: dict[str, Any]) -> str | None:
    """Return why a spec cannot run on this machine, or None. Raise an error if required packages are missing."""
    problems = checks.problems(spec, machine)
    if not problems:
        checks.check_needed(spec)
        if request.on is None:
            checks.check_hub(spec)
    return "; ".join(problems) or None


def _search(request: SweepRequest, firsts: Sequence[Job], machine: dict[str, Any], options: Options) -> Search:
    """Return the plan of `--until-oom`. `firsts` has one job per cell."""
    cells: dict[str, SearchCell] = {}
    for job in firsts:
        if (key := fingerprint_without_batch(with_changes(job.spec, TRIAL), options.gpu)) not in cells:
            values = {key: value for key, value in job.values.items() if key not in _SEARCHED}
            sets = (*request.sets, *settings(values.items()))
            cells[key] = SearchCell(job.spec, sets, values, _problem(request, job.spec, machine))
    if all(cell.refused for cell in cells.values()):
        raise MissingError("\n".join(dict.fromkeys(cell.refused or "" for cell in cells.values())))
    if options.gpu is None:
        raise MissingError(
            "--until-oom needs a GPU: a CPU swaps instead of running out of memory (`--set launch.mock=oom` tries "
            "the search without a GPU)"
        )
    return Search(cells.values(), options, first_gpu(machine) or None)


def run(ready: Ready, log_every_s: float | None = None) -> tuple[int, Tables]:
    """Run one session, and return its exit code and tables. Without a terminal, log progress every `log_every_s` s.

    Raises:
        MissingError: If a recipe would run without its published kernels, or if all jobs are skipped.
    """
    plan, folder, budget = ready.plan, ready.plan.options.folder, ready.request.time_budget
    skipped = [current.reason for current in plan.statuses.values() if current.state == "skipped"]
    if ready.unpublished or len(skipped) == len(plan.statuses) > 0:
        raise MissingError(ready.unpublished or "\n".join(dict.fromkeys(map(str, skipped))))
    deadline = None if budget is None else time.monotonic() + budget
    # Ray prints to stdout, which is reserved for the result.
    with locked(folder), LiveView(log_every_s) as view, redirect_stdout(sys.stderr):
        tables = ready.tables(plan, ready.impossible)
        view.event(f"{folder}: {status.counted(plan.statuses.values(), None) or 'searching'}")
        for cell, reason in ready.impossible:
            view.event(f"impossible  {cell}: {reason}")
        session = Session(ready.source, plan, ready.slots, tables, view, deadline)
        try:
            return tables.exit_code(session.run()), tables
        finally:
            if left := plan.left():
                view.event(f"{units.some(left, 'run')} left; run the same command to continue")
