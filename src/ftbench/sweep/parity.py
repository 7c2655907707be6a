"""`ftbench parity`: test whether recipes learn the same as the plain recipe in float32. Plan the runs, print the
verdicts, and write parity.json after every run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.errors import MissingError, SpecError
from ftbench.launch import checks, runner
from ftbench.report.data.collect import Record
from ftbench.report.document import Table
from ftbench.spec.ablation import with_changes
from ftbench.spec.experiment import CONTROLS, Experiment, resolve
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.spec.load import ImpossibleError, load
from ftbench.spec.methods import Full, Lora, Method, Qlora
from ftbench.spec.model_argument import spec_text
from ftbench.spec.reading import as_text
from ftbench.store import rundir
from ftbench.store.machine import commit, short
from ftbench.store.rundir import first_gpu
from ftbench.sweep import sweep as command
from ftbench.sweep import verdict
from ftbench.sweep.gpu_slots import LocalSlot
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan.base import PlanRequest
from ftbench.sweep.plan.parity import STEPS, Contender, Judgement, ParityPlan
from ftbench.sweep.verdict import LEVELS, LevelResult

AT_A_TIME = 2  # number of runs at the same time, if they may share the GPU
NOTE = (
    "each level: its worst number / the limit. forward: loss per sample in nats; gradient: gradients and weight "
    "changes by tensor; training: held-out loss over all seeds in nats, as two one-sided tests"
)


@dataclass(frozen=True, kw_only=True)
class ParityRequest(PlanRequest):
    """Options of `ftbench parity`. `recipes` are the recipes to judge; if empty, judge the spec itself. `steps` is the
    number of steps of each training. `controls` is `few` or `all`."""

    recipes: Sequence[str] = ()
    seeds: int = 3
    steps: int | None = None
    controls: str = "few"


def prepare(request: ParityRequest) -> command.Ready:
    """Plan a parity check without starting its runs. Raise SpecError or MissingError if the check is not possible."""
    if request.seeds == 1:
        raise SpecError("--seeds 1: one training cannot show that two recipes are equivalent: use 3, or 0 for none")
    if request.recipes and any(text.startswith("recipe=") for text in request.sets):
        raise SpecError("--set recipe=...: would replace the recipes of --recipe: give all recipes with --recipe A,B")
    sets = [*request.sets, *([] if request.steps is None else [f"train.max_steps={request.steps}"])]
    spec = load(request.spec, sets)
    _check(spec)
    sets += ["measure.eval=end", "measure.repeats=1"]
    if spec.dataset.is_generated:  # no samples after the last step, because the first packed rows may have fewer
        trained = (spec.train.max_steps or 0) * spec.train.batch_size * spec.train.gradient_accumulation_steps
        sets.append(f"dataset.samples={min(spec.dataset.samples or trained, trained)}")
    checks.check_disk(request.out)
    described = runner.describe(spec)
    recipes = [_contender(request, name, sets, described) for name in request.recipes or [""]]
    refused = [(recipe.name, recipe.refused) for recipe in recipes if recipe.refused]
    if len(refused) == len(recipes):
        raise MissingError(f"no recipe can be judged here: {'; '.join(map(': '.join, refused))}")
    options = request.options(request.out / runner.experiment(spec), runner.gpu_name(described), sets)
    plan = ParityPlan(recipes, request.seeds, request.controls == "all", options)
    fix = "To judge without them, add --set optimizations.triton_kernels=off"
    judged = ((each.name, load(request.spec, each.sets)) for each in recipes if each.refused is None)
    slots = [LocalSlot(f"run {at + 1}") for at in range(AT_A_TIME if spec.measure.share_gpu else 1)]
    return command.Ready(
        request, spec_text(request.spec), plan, slots, first_gpu(described) or None, refused,
        command.without_kernels(judged, checks.capability(described), fix), ParityTables,
    )  # fmt: skip


def _check(spec: Experiment) -> None:
    """Raise SpecError if `ftbench parity` cannot judge this spec."""
    problems = []
    if spec.objective.name != "sft":
        problems.append(f"objective {spec.objective.name}: only sft has a loss per sample: set objective=sft")
    if not spec.dataset.eval_samples:
        problems.append("no held-out data: set dataset.eval_samples=64 (or more)")
    if spec.train.max_steps is None:
        problems.append("the number of steps is unknown: give --steps 200 or set train.max_steps")
    if spec.launch.framework != "trl" or spec.launch.gpus > 1:
        problems.append("only ftbench's own loop on one GPU can be judged: set launch.framework=trl and launch.gpus=1")
    if problems:
        raise SpecError(*(f"parity cannot judge this spec: {problem}" for problem in problems))


def _contender(request: ParityRequest, name: str, sets: Sequence[str], described: dict[str, Any]) -> Contender:
    """Return the recipe `name` with its spec and its reference. If it cannot run here, set `refused` to the reason.
    Raise SpecError for an invalid spec. Raise MissingError if the reference cannot run."""
    recipe_sets = [*([f"recipe={name}"] if name else []), *sets]
    capability = checks.capability(described)
    spec, reason = load(request.spec, request.sets), None
    try:
        spec = resolve(load(request.spec, recipe_sets), capability)
        checks.check(spec, described)
    except (ImpossibleError, MissingError) as error:
        reason = "; ".join(str(error).splitlines())
    else:
        reason = "; ".join(incompatibilities(with_changes(spec, {"measure.gradients": STEPS}))) or None
    reference = _reference(resolve(load(request.spec, [*sets, "recipe=plain"]), capability), spec)
    if reason is None:
        checks.check(reference, described)
    return Contender(Path(name).stem if name else spec.name, spec, reference, tuple(recipe_sets), reason)


def _reference(plain: Experiment, spec: Experiment) -> Experiment:
    """Return the reference of `spec`: the plain recipe in float32, with the same adapters and the same quantization."""
    method = {"method": _plain_method(spec.method)}
    full = {"model.dtype": "float32", "train.precision": "fp32"}
    return with_changes(plain.model_copy(update=method), full)


def _plain_method(method: Method) -> Method:
    """Return the method of the reference, with the same adapters as `method`. If `method` has 4-bit weights, the
    reference has the same 4-bit weights and dequantises them to float32."""
    if isinstance(method, Full):
        return method
    if isinstance(method, Qlora):
        return method.model_copy(update={"compute_dtype": "float32", "upcast": True})
    shared = {name: getattr(method, name) for name in Lora.model_fields if name != "name"}
    return Qlora(**shared, compute_dtype="float32") if method.quantised else Lora(**shared)


class ParityTables(Tables):
    """The tables of a parity check."""

    plan: ParityPlan

    def exit_code(self, code: int) -> int:
        """Return the exit code of the session, but 1 only if a recipe did not pass: a control may fail."""
        return code if code > 1 else int(not self.plan.passed())

    def write(self) -> None:
        super().write()
        rundir.write_json(self.folder / "parity.json", self.document())

    def lines(self) -> Iterator[str]:
        """Yield two lines for each recipe: the verdict with its reason, and the settings and GPU of the judged run."""
        for recipe, judgement in zip(self.plan.recipes, self.plan.judgements(), strict=True):
            words = {key: as_text(value).strip('"') for key, value in self._settings(recipe).items()}
            yield ": ".join(filter(None, [f"{recipe.name}: {judgement.verdict}", judgement.reason]))
            if words:
                settings = ", ".join(f"{key} {word}" for key, word in words.items())
                yield f"{recipe.name} was judged with {settings}"
                if (now := short(commit())) != words["commit"] or now.endswith("-dirty"):
                    yield f"the source is now {now}, and the runs stay as they are: use another --out to judge changes"

    def answer(self, runs: Sequence[Record]) -> dict[str, Any]:
        plan = self.plan
        return {
            "seeds": plan.seeds, "passed": plan.passed(),
            "recipes": [
                judgement.record() | {"settings": self._settings(recipe), "controls": [
                    {"name": each.name, "level": each.level, "state": each.state} for each in plan.controls(recipe)
                ]}
                for recipe, judgement in zip(plan.recipes, plan.judgements(), strict=True)
            ],
            "budgets": {name: budget.source for name, budget in verdict.BUDGETS.items()},
        }  # fmt: skip

    def _settings(self, recipe: Contender) -> dict[str, Any]:
        """Return optimizations, precision and GPU of the judged run, and the commits of all runs, as recorded."""
        if recipe.refused:
            return {}
        run = self.plan.record_of(recipe.spec, recipe).run
        applied, machine = rundir.read_json(run.applied), rundir.read_json(run.machine)
        if "optimizer" not in applied:
            return {}
        optimizations = {name: value for name, value in recipe.spec.optimizations if value not in (False, "off", 0)}
        ended = [rundir.read_json(job.run.machine) for job, current in self.plan.statuses.items() if current.done]
        commits = sorted({short((each.get("ftbench") or {}).get("commit")) for each in ended if each})
        gpu = rundir.first_gpu(machine).get("name")
        return {
            "kernels": recipe.spec.optimizations.triton_kernels, "fp8": recipe.spec.optimizations.fp8,
            "precision": applied.get("product_precision"), "attention": applied.get("model", {}).get("attention"),
            "optimizer": applied["optimizer"].get("class"), "optimizations": " ".join(optimizations) or "none",
            "commit": " and ".join(commits), "gpu": gpu or "none",
        }  # fmt: skip

    def sections(self, runs: Sequence[Record]) -> Iterator[tuple[str, Table]]:
        judgements = self.plan.judgements()
        yield "recipes", Table({}, ["recipe", "verdict", *LEVELS], [_row(each) for each in judgements], [NOTE], LEVELS)
        controls = [
            [recipe.name, each.name, CONTROLS[each.name], each.level, each.state.upper() if each.state == "missed"
             else each.state, _figures(each.result)]
            for recipe in self.plan.recipes for each in self.plan.controls(recipe)
        ]  # fmt: skip
        headings = ["recipe", "control", "damage", "level", "state", "number / limit"]
        yield "controls", Table({}, headings, controls, [], tuple(headings))


def _row(judgement: Judgement) -> list[str]:
    levels = {level.level: f"{level.state} {_figures(level)}".strip() for level in judgement.levels}
    return [judgement.name, judgement.verdict, *(levels.get(name, "") for name in LEVELS)]


def _figures(result: LevelResult | None) -> str:
    if result is None or result.number is None or result.limit is None:
        return ""
    return f"{result.number:.2g} / {result.limit:.2g}"
