"""`ftbench ablate`: a spec → the variants of its plain recipe, run as a sweep."""

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
from ftbench.spec.reading import as_text
from ftbench.spec.resolve import require_published
from ftbench.store.output import write_output
from ftbench.store.rundir import first_gpu
from ftbench.sweep import command
from ftbench.sweep.execute.gpu_slots import local_slots
from ftbench.sweep.output.ablation import AblationTables, spec_lines
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan.ablation import OBJECTIVES, AblationPlan, Start
from ftbench.sweep.plan.base import PlanRequest


@dataclass(frozen=True, kw_only=True)
class AblationRequest(PlanRequest):
    """The command line. `steps` and `repeats` of each run; `only` names optimizations or variants."""

    steps: int | None = None
    repeats: int = 3
    only: Sequence[str] = ()
    objective: str = "speed"


def prepare(request: AblationRequest) -> command.Ready:
    """Plan without starting anything. Raise SpecError and MissingError for what is wrong or not there."""
    try:
        known(request.objective, OBJECTIVES, "goal")
    except ValueError as error:
        raise SpecError(f"--goal: {error}") from None
    sets = [*request.sets, *([] if request.steps is None else [f"train.max_steps={request.steps}"])]
    spec = load(request.spec, [*sets, f"measure.repeats={request.repeats}"])
    runner.check_disk(request.out)
    slots = local_slots((), mock=spec.launch.mock != "off")
    described = runner.describe(spec, slots[0].visible)
    if spec.launch.mock == "off":
        require_published(spec, runner.capability(described))
    plain = resolve(ablation.plain_spec(spec), runner.capability(described))
    runner.check(plain, described)
    variants = ablation.variants(plain.train.optimizer, request.only, plain.method.name == "full")
    start = Start(plain, variants, request.objective, lambda variant: _refused(variant, described), spec.optimizations)
    recipe = [f"recipe={ablation.PLAIN}", f"train.optimizer={plain.train.optimizer}"]
    folder = request.out / runner.experiment(plain)
    plan = AblationPlan(start, request.options(folder, runner.gpu_name(described), (*sets, *recipe)))
    return command.Ready(
        request, request.spec.read_bytes(), plan, slots, first_gpu(described) or None, list(plan.refused.items()),
        AblationTables,
    )  # fmt: skip


def _refused(spec: Experiment, described: dict[str, Any]) -> str | None:
    """Return why a spec cannot work, or not on this machine, or not with what is installed; None if it can."""
    problems, attention = runner.refused(spec, described), spec.optimizations.attention
    if spec.launch.mock == "off" and (lacking := trl.lacks_kernels(attention)):
        problems.append(f"optimizations.attention {attention}: {lacking}")
    if problems:
        return "; ".join(problems)
    try:
        runner.check_needed(spec)
    except (SpecError, MissingError) as error:
        return str(error)
    return None


def check_output(request: AblationRequest, path: Path) -> None:
    """Raise SpecError, before anything is run, where the best combination could not be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise SpecError(f"-o {path}: " + ("is a directory" if path.is_dir() else "its folder does not exist"))
    if path.exists() and path.samefile(request.spec):
        raise SpecError(f"-o {path}: is the spec itself, which the best combination extends: name another file")


def write_best(request: AblationRequest, tables: Tables, path: Path) -> None:
    """Write the best combination as a spec that extends the one that was asked about, and switches off what that one
    has on. Raise FtbenchError where the
    plain recipe has no figures to be better than."""
    plan = tables.plan
    assert isinstance(plan, AblationPlan)
    if (plain := plan.cell({})) is None or not plain.ok:
        raise FtbenchError(f"{path}: not written, the plain recipe has no figures ({plan.state({})})")
    values: dict[str, Any] = {}
    optimizer = {"train": {"optimizer": plan.start.spec.train.optimizer}}
    changes = (nested(key.split("."), value) for key, value in plan.best.items())
    for data in (layer.data for layer in map(set_layer, request.sets)):
        values = merge(values, data)
    written, given = plan.start.optimizations.model_dump(), values.get("optimizations", {})
    off = {key: value for key, value in Optimizations().model_dump().items() if key in given or value != written[key]}
    for data in (optimizer, {"optimizations": off}, *changes):
        values = merge(values, data)
    source = os.path.relpath(request.spec, path.parent)
    head = f"# {ablation.label(plan.best)}: the best for {plan.start.objective} of {tables.folder.name}\n"
    said = {key: value for key, value in values.items() if value != {}}
    write_output(path, f"{head}extends: {as_text(source)}\n{spec_lines(said)}")
