"""`ftbench sweep`: what was asked for → a plan, the places to run it in, and one sitting of it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftbench.core.units import gibibytes, seconds
from ftbench.errors import MissingError, SpecError
from ftbench.estimate import preflight
from ftbench.estimate.time.duration import SHEET, epochs_samples
from ftbench.estimate.time.run_index import Store
from ftbench.launch import runner
from ftbench.spec import identity
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.refusals import refusals, refusals_on
from ftbench.spec.sweep import Cell, cells
from ftbench.store.rundir import first_gpu
from ftbench.sweep.execute import budget
from ftbench.sweep.execute.journal import JOURNAL, Journal, locked
from ftbench.sweep.execute.loop import Sweep
from ftbench.sweep.execute.places import Place, local_places
from ftbench.sweep.jobs import Job, command, short
from ftbench.sweep.output import view
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan import frontier
from ftbench.sweep.plan.grid import Grid, Options, Plan, jobs_of
from ftbench.sweep.plan.search import Family, Search, trial_of

_BATCH = ("train.batch_size", "train.gradient_accumulation_steps")


@dataclass(frozen=True, slots=True)
class Request:
    """The command line. `axes` are `key=value,value`; `time_budget` as `8h`; `gpus` as --gpus lists them; `on` names a
    Ray cluster."""

    spec: Path
    sets: Sequence[str] = ()
    axes: Sequence[str] = ()
    out: Path = Path("results")
    until_oom: bool = False
    trial_steps: int = 7
    effective_batch: int | None = None
    time_budget: str | None = None
    retry_failed: bool = False
    force: bool = False
    gpus: Sequence[str] = ()
    on: str | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A plan that can be started. `device` is the GPU of machine.json; `impossible` are the cells that can be on no
    machine, with the reason; `tables` makes what is written after each run; `notes` are what does nothing."""

    request: Request
    folder: Path
    source: bytes
    plan: Plan
    places: Sequence[Place]
    gpu: str | None
    device: dict[str, Any] | None
    impossible: Sequence[tuple[str, str]]
    tables: Callable[..., Tables] = Tables
    notes: Sequence[str] = ()


def prepare(request: Request, stack: ExitStack) -> Ready:
    """Plans without starting anything, but for a connection to a cluster, which `stack` closes. Raises SpecError and
    MissingError for what is wrong or not there."""
    if request.time_budget:
        budget.duration(request.time_budget)
    if request.effective_batch and not request.until_oom:
        raise SpecError("--effective-batch goes with --until-oom; elsewhere set train.gradient_accumulation_steps")
    notes: list[str] = []
    found = cells(request.spec, request.sets, request.axes, notes.append)
    specs = [cell.spec for cell in found if cell.spec is not None]
    if not specs:
        raise SpecError(*dict.fromkeys(f"no cell can work: {cell.refused}" for cell in found))
    folders = {runner.experiment(spec): spec for spec in specs}
    if len(folders) > 1:
        raise SpecError("launch.mock: a sweep is a mock as a whole or not at all; make off a sweep of its own")
    name, first = next(iter(folders.items()))
    runner.check_disk(request.out)
    places, described = _places(request, first, stack)
    capability, gpu = runner.capability(described), first_gpu(described) or None
    options = Options(
        request.out / name, runner.gpu_name(described), tuple(request.sets), request.retry_failed, request.force
    )

    def resolved(spec: Experiment) -> Experiment:
        return resolve(spec, capability)

    def refused(spec: Experiment) -> str | None:
        problems = refusals(spec) + (refusals_on(spec, capability) if spec.launch.mock == "off" else [])
        if not problems:
            runner.check(spec, described)
        return "; ".join(problems) or None

    plan: Plan = _search(request, found, resolved, refused, options, gpu) if request.until_oom else _grid(
        request, found, resolved, refused, options
    )  # fmt: skip
    notes += _same(request, found, resolved, options.gpu)
    nowhere = [(_named(cell.values), cell.refused) for cell in found if cell.refused]
    return Ready(
        request, options.folder, request.spec.read_bytes(), plan, places, options.gpu, gpu, nowhere,
        notes=notes,
    )  # fmt: skip


def _places(request: Request, spec: Experiment, stack: ExitStack) -> tuple[Sequence[Place], dict[str, Any]]:
    """Where to run, and the machine.json of a place: all are of one kind."""
    if request.on is None:
        places = local_places(request.gpus, mock=spec.launch.mock != "off")
        return places, runner.describe(spec, places[0].visible)
    from ftbench.sweep.execute.ray import cluster_places

    return cluster_places(request.on, spec, stack)


def _named(values: dict[str, Any]) -> str:
    return " ".join(f"{key}={short(value)}" for key, value in values.items())


def _same(request: Request, found: Sequence[Cell], resolved: Resolved, gpu: str | None) -> Iterator[str]:
    """A sentence on cells that make no run of their own: what they differ in changes no result."""
    name = identity.family if request.until_oom else identity.fingerprint
    first: dict[str, dict[str, Any]] = {}
    keys, count = dict[str, None](), 0
    for cell in found:
        if cell.spec is not None:
            values = {key: value for key, value in cell.values.items() if not (request.until_oom and key in _BATCH)}
            others = first.setdefault(name(resolved(cell.spec), gpu), values)
            differing = [key for key, value in values.items() if value != others[key]]
            count += differing not in ([], ["measure.repeats"])
            keys |= dict.fromkeys(differing)
    if count:
        yield f"{count} of {len(found)} cells are the run of another but for {', '.join(keys)}: they run once"


Resolved = Callable[[Experiment], Experiment]
Refused = Callable[[Experiment], str | None]


def _grid(request: Request, found: Sequence[Cell], resolved: Resolved, refused: Refused, options: Options) -> Grid:
    jobs = jobs_of(found, resolved, options)
    if request.time_budget:
        jobs = budget.most_telling_first(jobs)
    reasons = {job: reason for job in jobs if (reason := refused(job.spec)) is not None}
    if len(reasons) == len(jobs):
        raise MissingError("\n".join(dict.fromkeys(reasons.values())))
    return Grid(jobs, reasons, options)


def _search(
    request: Request,
    found: Sequence[Cell],
    resolved: Resolved,
    refused: Refused,
    options: Options,
    gpu: dict[str, Any] | None,
) -> Search:
    families: dict[str, Family] = {}
    for cell in found:
        if cell.spec is not None:
            spec = resolved(cell.spec)
            values = {key: value for key, value in cell.values.items() if key not in _BATCH}
            sets = (*request.sets, *replace(cell, values=values).sets)
            families.setdefault(identity.family(spec), Family(spec, sets, values, refused(spec)))
    if all(family.refused for family in families.values()):
        raise MissingError("\n".join(dict.fromkeys(family.refused or "" for family in families.values())))
    if options.gpu is None:
        raise MissingError(
            "--until-oom needs a GPU: a CPU's memory ends in swapping, not in an answer (`--set launch.mock=oom` tries "
            "the search without one)"
        )
    return Search(families.values(), options, request.trial_steps, request.effective_batch, gpu)


def run(ready: Ready) -> tuple[int, Tables]:
    """One sitting; the tables are in the folder and stay there. Returns the exit code, and the tables."""
    limit = budget.duration(ready.request.time_budget) if ready.request.time_budget else None
    deadline = None if limit is None else time.monotonic() + limit
    with locked(ready.folder), view.View() as shown:
        journal = Journal(ready.folder / JOURNAL)
        tables = ready.tables(ready.folder, ready.plan, ready.gpu, ready.impossible)
        about = {"spec": ready.request.spec.name, "gpu": ready.gpu, "until_oom": ready.request.until_oom}
        shown.event(f"{ready.folder}: {view.counted(ready.plan.standings.values(), None) or 'searching'}")
        for what, reason in ready.impossible:
            shown.event(f"cannot work  {what}: {reason}")
        sweep = Sweep(
            ready.folder, ready.source, ready.plan, ready.places, tables, journal, shown, deadline, about
        )  # fmt: skip
        try:
            return sweep.run(), tables
        finally:
            left = sum(not found.done for found in ready.plan.standings.values())
            if left:
                shown.event(f"{left} runs are left; the same command goes on with them")
            journal.close()


@dataclass(frozen=True, slots=True)
class Planned:
    """A line of --dry-run: seconds and GiB are estimates from runs that have ended, where there are such; `verdict` is
    that of `ftbench estimate`, and so are GiB where no run has ended. `estimated_s` are seconds by an estimate where no
    run of the sweep tells, and `confidence` says from what."""

    what: str
    state: str
    reason: str | None
    seconds: float | None
    peak_gb: float | None
    verdict: str | None
    estimated_s: float | None
    confidence: str | None
    command: list[str]


def dry_run(ready: Ready) -> list[Planned]:
    """Every job with where it stands and the command that makes it; of a search for the frontier the first trials."""
    plan, request = ready.plan, ready.request
    if isinstance(plan, Search):
        plan.next(lambda job: True)
        while plan.next(lambda job: True) is not None:
            pass
    trials: dict[str, list[frontier.Trial]] = {}
    for job, found in plan.standings.items():
        if found.state == "ok":
            trials.setdefault(job.family, []).append(trial_of(job, found))
    lines, store = [], Store.read(request.out) if ready.device else Store()
    for job, found in plan.standings.items():
        state = "pending" if found.state == "running" else found.state
        peak = frontier.peak_on_the_line(trials.get(job.family, []), job.spec.train.batch_size)
        expected = None if found.done else plan.history.at_most_s(job)
        said = None if found.done else preflight.on_machine(job.spec, ready.device)
        peak = said.reserved.expected if peak is None and said is not None else peak
        verdict = said.verdict if said else None
        unknown = not found.done and expected is None
        time = _estimated(job.spec, ready, store) if unknown else (None, None)
        lines.append(Planned(
            job.what, state, found.reason, expected, peak, verdict, *time, command=_command(request, job)
        ))  # fmt: skip
    return lines + [
        Planned(what, "impossible", reason, None, None, None, None, None, []) for what, reason in ready.impossible
    ]


def _estimated(spec: Experiment, ready: Ready, store: Store) -> tuple[float | None, str | None]:
    """Wall seconds and how they are known; nothing by the data sheet alone, which would be a guess in a plan."""
    found = preflight.time_on_machine(spec, ready.device, store)
    if found is None or found.basis == SHEET or (samples := epochs_samples(spec, found.samples)) is None:
        return None, None
    return found.seconds_for(samples).expected, found.confidence


def _command(request: Request, job: Job) -> list[str]:
    return command(request.spec, job, request.out)


def as_text(lines: Sequence[Planned]) -> str:
    """--dry-run for people."""
    shown = []
    for line in lines:
        duration = f"at most {seconds(line.seconds)}" if line.seconds else ""
        if line.estimated_s:
            duration = f"about {seconds(line.estimated_s)} ({line.confidence})"
        memory = f"{gibibytes(line.peak_gb)} GiB" if line.peak_gb else ""
        verdict = line.verdict if line.verdict != "fits" else None
        told = ", ".join(part for part in (line.reason, duration, memory, verdict) if part)
        shown.append(f"{line.state:<10} {line.what}" + (f": {told}" if told else ""))
        if line.command:
            shown.append(f"           {shlex.join(line.command)}")
    return "\n".join(shown)
