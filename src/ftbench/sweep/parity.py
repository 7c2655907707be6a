"""`ftbench parity`: do recipes learn what a reference recipe learns? A spec → runs of both over several seeds and
controls that must not pass, run as a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.errors import MissingError, SpecError
from ftbench.launch import runner
from ftbench.spec.experiment import resolve
from ftbench.spec.load import ImpossibleError, load
from ftbench.store.rundir import first_gpu
from ftbench.sweep import command
from ftbench.sweep.execute.gpu_slots import LocalSlot
from ftbench.sweep.output.parity import ParityTables
from ftbench.sweep.plan.base import PlanRequest
from ftbench.sweep.plan.parity import Contender, ParityPlan

HELD_OUT = 32  # samples, where the spec sets none aside


@dataclass(frozen=True, kw_only=True)
class ParityRequest(PlanRequest):
    """The command line. `against` names the reference recipe, `recipes` those held against it: none is the spec as it
    is. `steps` of each run; `gradients` of the first steps are compared; `parallel` runs share the GPU."""

    against: str = "plain"
    recipes: Sequence[str] = ()
    seeds: int = 3
    steps: int | None = None
    gradients: int = 3
    parallel: int = 1


def prepare(request: ParityRequest) -> command.Ready:
    """Plan without starting anything. Raise SpecError and MissingError for what is wrong or not there."""
    sets = _sets(request)
    spec = load(request.spec, sets)
    runner.check_disk(request.out)
    slots = [
        LocalSlot(f"place {number + 1}" if request.parallel > 1 else "this machine")
        for number in range(request.parallel)
    ]
    described = runner.describe(spec)
    reference = _recipe(request, request.against, [*sets, f"recipe={request.against}"], described)
    if reference.refused:
        raise MissingError(f"--against {request.against}: {reference.refused}")
    named = [_recipe(request, Path(name).stem, [*sets, f"recipe={name}"], described) for name in request.recipes]
    recipes = named or [_recipe(request, spec.name, sets, described)]
    refused = [(recipe.name, recipe.refused) for recipe in recipes if recipe.refused]
    if len(refused) == len(recipes):
        raise MissingError(f"no recipe can be judged here: {'; '.join(map(': '.join, refused))}")
    options = request.options(request.out / runner.experiment(spec), runner.gpu_name(described), sets)
    plan = ParityPlan(reference, recipes, request.seeds, request.gradients, options)
    return command.Ready(
        request, request.spec.read_bytes(), plan, slots, first_gpu(described) or None, refused, ParityTables
    )


def _sets(request: ParityRequest) -> list[str]:
    """Return the changes to the spec file that all runs share."""
    sets = [*request.sets, *([] if request.steps is None else [f"train.max_steps={request.steps}"])]
    spec = load(request.spec, sets)
    if spec.objective.prompts:
        raise SpecError(
            f"parity holds losses against each other, and those of objective {spec.objective.name} say nothing of "
            "learning: compare the column reward of steps.csv"
        )
    held_out = [] if spec.dataset.eval_samples else [f"dataset.eval_samples={HELD_OUT}"]
    shared = ["measure.share_gpu=on"] if request.parallel > 1 else []
    return [*sets, *held_out, "measure.eval=end", "measure.repeats=1", *shared]


def _recipe(request: ParityRequest, name: str, sets: Sequence[str], described: dict[str, Any]) -> Contender:
    """Return a recipe, with the reason where it cannot run on this machine. Raise SpecError for one that is wrong."""
    try:
        spec = resolve(load(request.spec, sets), runner.capability(described))
        runner.check(spec, described)
    except (ImpossibleError, MissingError) as error:
        return Contender(name, load(request.spec, request.sets), tuple(sets), "; ".join(str(error).splitlines()))
    return Contender(name, spec, tuple(sets))
