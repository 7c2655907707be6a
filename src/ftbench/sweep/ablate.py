"""`ftbench ablate`: a spec → a ladder of its optimizations, run as a sweep."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.launch import runner, trl
from ftbench.spec import ablation
from ftbench.spec.base import known
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.load import load, merge, nested, set_layer
from ftbench.spec.optimizations import Optimizations
from ftbench.spec.refusals import refusals, refusals_on
from ftbench.spec.sweep import as_text
from ftbench.store import rundir
from ftbench.store.rundir import first_gpu
from ftbench.sweep import command
from ftbench.sweep.execute import budget
from ftbench.sweep.execute.places import local_places
from ftbench.sweep.output.ablation import Ablation, spec_lines
from ftbench.sweep.plan.ablation import OBJECTIVES, Ladder, Start
from ftbench.sweep.plan.grid import Options


@dataclass(frozen=True, slots=True)
class Request:
    """The command line. `steps` and `repeats` of each run; `only` names optimizations or variants."""

    spec: Path
    sets: Sequence[str] = ()
    out: Path = Path("results")
    steps: int | None = None
    repeats: int = 3
    only: Sequence[str] = ()
    objective: str = "speed"
    time_budget: str | None = None
    retry_failed: bool = False
    force: bool = False


def prepare(request: Request) -> command.Ready:
    """Plans without starting anything. Raises SpecError and MissingError for what is wrong or not there."""
    try:
        known(request.objective, OBJECTIVES, "objective")
    except ValueError as error:
        raise SpecError(f"--objective: {error}") from None
    if request.time_budget:
        budget.duration(request.time_budget)
    sets = [*request.sets, f"measure.repeats={request.repeats}"]
    sets += [] if request.steps is None else [f"train.max_steps={request.steps}"]
    spec = load(request.spec, sets)
    runner.check_disk(request.out)
    places = local_places((), mock=spec.launch.mock != "off")
    described = runner.describe(spec, places[0].visible)
    capability, gpu = runner.capability(described), runner.gpu_name(described)
    plain = resolve(ablation.plain_spec(spec), capability)
    runner.check(plain, described)
    variants = ablation.variants(plain.train.optimizer, request.only)

    def refused(found: Experiment) -> str | None:
        return _refused(found, described, capability)

    recipe = [f"recipe={ablation.PLAIN}", f"train.optimizer={plain.train.optimizer}"]
    kept = [text for text in sets if not text.startswith("measure.repeats")]
    folder = request.out / runner.experiment(plain)
    options = Options(folder, gpu, (*kept, *recipe), request.retry_failed, request.force)
    plan = Ladder(Start(plain, variants, request.objective, refused), options)
    sweep = command.Request(
        request.spec, kept, out=request.out, time_budget=request.time_budget, retry_failed=request.retry_failed,
        force=request.force,
    )  # fmt: skip
    return command.Ready(
        sweep,
        folder,
        request.spec.read_bytes(),
        plan,
        places,
        gpu,
        first_gpu(described) or None,
        list(plan.refused.items()),
        Ablation,
    )  # fmt: skip


def _refused(spec: Experiment, described: dict[str, Any], capability: tuple[int, int] | None) -> str | None:
    """Why a spec cannot work, or not on this machine, or not with what is installed; None if it can."""
    problems = refusals(spec)
    if spec.launch.mock == "off":
        problems += refusals_on(spec, capability)
        if lacking := trl.lacks_kernels(spec.optimizations.attention):
            problems.append(f"optimizations.attention {spec.optimizations.attention}: {lacking}")
    if problems:
        return "; ".join(problems)
    try:
        runner.check(spec, described)
    except (SpecError, MissingError) as error:
        return str(error)
    return None


def run(ready: command.Ready) -> tuple[int, Ablation]:
    """One sitting, as of any sweep: the exit code and what was found."""
    code, found = command.run(ready)
    assert isinstance(found, Ablation)
    return code, found


def check_output(request: Request, path: Path) -> None:
    """Raises SpecError, before anything is run, where the best combination could not be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise SpecError(f"-o {path}: " + ("is a directory" if path.is_dir() else "its folder does not exist"))
    if path.exists() and path.samefile(request.spec):
        raise SpecError(f"-o {path}: is the spec itself, which the best combination extends: name another file")


def write_best(request: Request, found: Ablation, path: Path) -> None:
    """The best combination as a spec that extends the one that was asked about. Raises FtbenchError where the plain
    recipe has no figures to be better than."""
    plan = found.plan
    if (plain := plan.cell({})) is None or not plain.ok:
        raise FtbenchError(f"{path}: not written, the plain recipe has no figures ({plan.state({})})")
    values: dict[str, Any] = {}
    optimizer = {"train": {"optimizer": plan.start.spec.train.optimizer}}
    for data in (*(layer.data for layer in map(set_layer, request.sets)), optimizer):
        values = merge(values, data)
    values = merge(values, {"optimizations": Optimizations().model_dump()})
    for key, value in plan.best.items():
        values = merge(values, nested(key.split("."), value))
    source = os.path.relpath(request.spec, path.parent)
    head = f"# {ablation.label(plan.best)}: the best for {plan.start.objective} of {found.folder.name}\n"
    rundir.write_text(path, f"{head}extends: {as_text(source)}\n{spec_lines(values)}")
