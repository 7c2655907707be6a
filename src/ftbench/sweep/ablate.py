"""`ftbench ablate`: run variants of the plain recipe as a sweep."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.launch import checks, runner
from ftbench.spec import ablation
from ftbench.spec.base import known
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.incompatibilities import require_published
from ftbench.spec.load import load, merge, nested, set_layer
from ftbench.spec.model_argument import spec_text
from ftbench.spec.optimizations import Optimizations
from ftbench.spec.reading import as_text
from ftbench.store.output import write_output
from ftbench.store.rundir import first_gpu
from ftbench.sweep import sweep
from ftbench.sweep.gpu_slots import local_slots
from ftbench.sweep.output.ablation import AblationTables, spec_lines
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan.ablation import OBJECTIVES, AblationPlan, Start
from ftbench.sweep.plan.base import PlanRequest


@dataclass(frozen=True, kw_only=True)
class AblationRequest(PlanRequest):
    """Command line of an ablation. `only` names optimizations or variants."""

    steps: int | None = None
    repeats: int = 3
    only: Sequence[str] = ()
    objective: str = "speed"


def prepare(request: AblationRequest) -> sweep.Ready:
    """Build the plan without starting runs. Raise SpecError and MissingError for invalid or missing things."""
    try:
        known(request.objective, OBJECTIVES, "goal")
    except ValueError as error:
        raise SpecError(f"--goal: {error}") from None
    sets = [*request.sets, *([] if request.steps is None else [f"train.max_steps={request.steps}"])]
    spec = load(request.spec, [*sets, f"measure.repeats={request.repeats}"])
    checks.check_disk(request.out)
    slots = local_slots((), mock=spec.launch.mock != "off")
    described = runner.describe(spec, slots[0].visible)
    if spec.launch.mock == "off":
        require_published(spec, checks.capability(described))
    plain = resolve(ablation.plain_spec(spec), checks.capability(described))
    checks.check(plain, described)
    variants = ablation.variants(plain.train.optimizer, request.only, plain.method.name == "full")
    start = Start(plain, variants, request.objective, lambda variant: _refused(variant, described), spec.optimizations)
    recipe = [f"recipe={ablation.PLAIN}", f"train.optimizer={plain.train.optimizer}"]
    folder = request.out / runner.experiment(plain)
    plan = AblationPlan(start, request.options(folder, runner.gpu_name(described), (*sets, *recipe)))
    return sweep.Ready(
        request, spec_text(request.spec), plan, slots, first_gpu(described) or None, list(plan.refused.items()),
        AblationTables,
    )  # fmt: skip


def _refused(spec: Experiment, described: dict[str, Any]) -> str | None:
    """Return why a spec cannot run on this machine, or None."""
    if problems := checks.problems(spec, described):
        return "; ".join(problems)
    try:
        checks.check_needed(spec)
    except (SpecError, MissingError) as error:
        return str(error)
    return None


def check_output(request: AblationRequest, path: Path) -> None:
    """Raise SpecError if the best combination could not be written to `path`."""
    if path.is_dir() or not path.parent.is_dir():
        raise SpecError(f"-o {path}: " + ("is a directory" if path.is_dir() else "the folder does not exist"))
    if path.exists() and path.samefile(request.spec):
        raise SpecError(f"-o {path}: is the spec itself: choose another file")


def write_best(request: AblationRequest, tables: Tables, path: Path) -> None:
    """Write the best combination as a spec that extends the original one and disables its other optimizations.

    Raise FtbenchError if the plain recipe has no result.
    """
    plan = tables.plan
    assert isinstance(plan, AblationPlan)
    if (plain := plan.cell({})) is None or not plain.ok:
        raise FtbenchError(f"{path}: not written: the plain recipe has no result ({plan.state({})})")
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
    given_values = {key: value for key, value in values.items() if value != {}}
    write_output(path, f"{head}extends: {as_text(source)}\n{spec_lines(given_values)}")
