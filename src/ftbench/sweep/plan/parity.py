"""The plan of a parity check: the list of its runs, and the verdicts from the files of these runs.

The reference of a recipe is the plain recipe in float32, with the same trained tensors. There are three kinds of runs.
Short runs record losses, gradients and weight changes, at weights that the first training of the reference saved.
Trainings run with several seeds. Controls are damaged on purpose, and the check must detect the damage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ftbench.spec.ablation import with_changes
from ftbench.spec.experiment import GRADED, OF_ADAPTERS, Experiment
from ftbench.spec.methods import GPT_OSS, family, has_experts
from ftbench.store.rundir import NOT_FINITE, read_json, write_json
from ftbench.sweep import verdict
from ftbench.sweep.parity_records import FAIL, INCONCLUSIVE, PASS, Training, agreement, probe, same_samples
from ftbench.sweep.plan.base import Job, Options, job
from ftbench.sweep.plan.grid import Grid
from ftbench.sweep.verdict import EIGHT_BIT, LevelResult

SMALL = 4  # largest batch of a float32 run that records gradients
# Changes of plain runs that make the same numbers round in another way. A factor of 0.5 would not change the rounding.
SCALES: list[dict[str, Any]] = [{}, {"measure.round_scale": 0.85}, {"measure.round_scale": 0.7}]  # 8-bit products
WITH_EXPERTS: list[dict[str, Any]] = [{}, {"optimizations.compile": True}, {"optimizations.attention": "eager"}]
STEPS = 3  # steps recorded at initial and at trained weights; wrong Adam betas and weight decay appear in step 2
PENDING, UNPROVEN, BROKEN = "not run yet", "no verdict", "did not end"


@dataclass(frozen=True, slots=True)
class Contender:
    """A recipe to judge: spec, reference and `--set` options. If the recipe cannot run, `refused` is the reason."""

    name: str
    spec: Experiment
    reference: Experiment
    sets: tuple[str, ...] = ()
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a recipe: the worst result of its levels. `reason` is a sentence about the cause."""

    name: str
    verdict: str
    reason: str
    levels: tuple[LevelResult, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the verdict as a dictionary for JSON."""
        return asdict(self) | {"levels": {level.level: asdict(level) for level in self.levels}}


@dataclass(frozen=True, slots=True)
class ControlResult:
    """The result of a control. `level` is the level that must detect the damage. `any` means at least one level."""

    name: str
    level: str
    state: str
    result: LevelResult | None = None


class ParityPlan(Grid):
    """The runs of `recipes`, their references and their controls. There are `seeds` trainings per recipe. If `seeds` is
    0, leave out the training level. Run one control per level, or all controls if `every_control` is True."""

    has_commands = False  # references and controls change keys that the spec file does not have

    def __init__(self, recipes: Sequence[Contender], seeds: int, every_control: bool, options: Options) -> None:
        self.recipes, self.seeds, self.every_control, self.options = recipes, seeds, every_control, options
        self._kept: dict[Job, dict[str, Any]] = {}
        able = [recipe for recipe in recipes if not recipe.refused]
        jobs = [each for recipe in able for each in self._records(recipe)]
        jobs += [each for recipe in able if seeds for each in self._trainings(recipe)]
        super().__init__(jobs, {}, options)

    def next(self, has_time: Callable[[Job], bool]) -> Job | None:
        """Return a job to start now, or None. A job that reads saved weights follows their run and takes as long."""
        jobs = {each.run.run_id: each for each in self.statuses}

        def is_ready(job: Job) -> bool:
            source = jobs.get(job.spec.measure.weights_of, job)
            return has_time(source) and (source is job or self.statuses[source].done)

        return super().next(is_ready)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _records(self, recipe: Contender) -> Iterator[Job]:
        """Yield the runs of the forward and gradient levels, in the order of their dependencies."""
        yield self.train(recipe.reference, 0)
        yield self.record_of(recipe.reference, recipe)
        for plain in self.plains(recipe):
            yield self.record_of(plain, recipe)
        yield self.record_of(recipe.spec, recipe)
        for name, level in self.controls_of(recipe):
            if level != "training":
                yield self.record_of(self.plain(recipe), recipe, name)

    def _trainings(self, recipe: Contender) -> Iterator[Job]:
        yield self.untrained(recipe)
        for seed in range(self.seeds):
            yield self.train(recipe.reference, seed)
            yield self.train(recipe.spec, seed, recipe)
            for name, level in self.controls_of(recipe):
                if level == "training":
                    yield self.train(recipe.reference, seed, None, name)

    def controls_of(self, recipe: Contender) -> list[tuple[str, str]]:
        """Return (control, level that must detect its damage): one per level, then those that any level may detect."""
        adapters, wide = recipe.spec.method.adapters, len(self.plains(recipe)) > 1  # several plain runs: wider limits
        forward = ("lora_scale_x1.5" if wide else "lora_scale_x1.05") if adapters else "loss_over_padding"
        backward = "layer_gradient_reversed" if verdict.kinds(recipe.spec)[0] == EIGHT_BIT else "gradient_entries_lost"
        # Full training learns the same with the gradient of one layer reversed, or with 1.1 times the learning rate.
        in_training = "layer_gradient_reversed" if adapters else "learning_rate_x0.1"
        levels = [(forward, "forward"), (backward, "gradient"), (in_training, "training")][: 3 if self.seeds else 2]
        if not self.every_control:
            return levels
        done = {name for name, level in levels if level != "training"}
        others = [name for name in GRADED if name not in done and (adapters or name not in OF_ADAPTERS)]
        return levels + [(name, "any") for name in others]

    def plains(self, recipe: Contender) -> list[Experiment]:
        """Return the plain runs whose rounding errors set the limits: none, one, or several if these errors vary a lot.

        They vary in mixtures of experts, probably because a rounding error can send a token to another expert."""
        changes = WITH_EXPERTS[:1] if verdict.rounds(recipe.spec) else []
        if verdict.kinds(recipe.spec)[0] == EIGHT_BIT:
            changes = SCALES
        elif changes and has_experts(recipe.spec.model):  # the default attention of gpt-oss is eager
            changes = WITH_EXPERTS[:2] if family(recipe.spec.model) == GPT_OSS else WITH_EXPERTS
        return [self.plain(recipe, each) for each in changes]

    def plain(self, recipe: Contender, other: Mapping[str, Any] | None = None) -> Experiment:
        """Return the plain recipe in the precision of `recipe`, with `other` changes."""
        spec = recipe.spec
        if not verdict.rounds(spec):
            return recipe.reference
        changes: dict[str, Any] = {"model.dtype": spec.model.dtype, "train.precision": spec.train.precision}
        if verdict.kinds(spec)[0] == EIGHT_BIT:
            changes |= {"measure.round_products": True}
        if hasattr(recipe.reference.method, "compute_dtype"):
            changes["method.compute_dtype"] = spec.model.dtype
        return with_changes(recipe.reference, {**changes, **(other or {})})

    def train(self, spec: Experiment, seed: int, recipe: Contender | None = None, control: str = "off") -> Job:
        """Return the job that trains `spec` with this seed. The first training of a reference saves its weights."""
        changes: dict[str, Any] = {"train.seed": spec.train.seed + seed, "measure.control": control}
        if spec.method.name == "unsloth":  # unsloth initialises adapters with this seed
            changes["method.random_state"] = spec.method.random_state + seed
        if spec.method.name == "full":  # no adapters to initialise: change the data
            changes["dataset.seed"] = spec.dataset.seed + seed
        if recipe is None and not seed and control == "off":
            changes["measure.keep_weights"] = True
        changes |= same_samples(spec)
        name = recipe.name if recipe else "reference" if control == "off" else f"control: {control}"
        return self._job(spec, changes, {"recipe": name, "run": f"training {seed + 1}"}, recipe)

    def untrained(self, recipe: Contender) -> Job:
        """Return the run that measures the held-out loss of the initial weights."""
        changes = {"measure.control": "learning_rate_0", "train.max_steps": 1}
        return self._job(recipe.reference, changes, {"recipe": "reference", "run": "untrained"}, None)

    def record_of(self, spec: Experiment, recipe: Contender, control: str = "off") -> Job:
        """Return the short run that records the losses, gradients and weight changes of a spec."""
        name = "reference" if spec is recipe.reference else recipe.name if spec is recipe.spec else "plain"
        name = name if control == "off" else f"control: {control}"
        rounds = verdict.kinds(recipe.spec)[0] != "float32"  # rounding errors vary, so compare more samples
        batch = recipe.reference.train.batch_size if rounds else min(SMALL, recipe.reference.train.batch_size)
        dataset = probe(spec, batch)
        changes: dict[str, Any] = {
            "train.batch_size": min(spec.train.batch_size, batch), "train.max_steps": 2 * (1 + STEPS),
            "train.gradient_accumulation_steps": dataset.samples, "train.lr_scheduler": "linear",
            "train.warmup_steps": 0, "measure.gradients": STEPS, "measure.control": control,
            "measure.weights_of": self.train(recipe.reference, 0).run.run_id,
        }  # fmt: skip
        # CUDA graphs do not support gradient accumulation, and a scale of 8-bit numbers covers one micro-batch.
        if spec.optimizations.cuda_graph or (recipe.spec.optimizations.cuda_graph and spec.measure.round_products):
            changes |= {"train.batch_size": dataset.samples, "train.gradient_accumulation_steps": 1}
        if spec.method.adapters:
            changes["method.dropout"] = 0.0
        if control == "packed_samples_see_each_other":
            changes["optimizations.packing"] = True
        spec = spec.model_copy(update={"dataset": dataset})
        return self._job(spec, changes, {"recipe": name, "run": "gradients"}, recipe)

    def _job(
        self, spec: Experiment, changes: Mapping[str, Any], values: dict[str, Any], recipe: Contender | None
    ) -> Job:
        spec, sets = with_changes(spec, changes), recipe.sets if recipe else ()
        return job(spec, sets, values, 1, self.options.folder, self.options.gpu)

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def judgements(self) -> list[Judgement]:
        """Return the verdict on each recipe."""
        return [self._judged(recipe) for recipe in self.recipes]

    def passed(self) -> bool:
        """Return whether every recipe has the verdict `pass`."""
        return all(each.verdict == PASS for each in self.judgements())

    def controls(self, recipe: Contender) -> list[ControlResult]:
        """Return the outcome of each control of a recipe."""
        return [] if recipe.refused else [self._controlled(recipe, *each) for each in self.controls_of(recipe)]

    def _judged(self, recipe: Contender) -> Judgement:
        if recipe.refused:
            return Judgement(recipe.name, FAIL, recipe.refused)
        record = self.record_of(recipe.spec, recipe)
        trainings = [self.train(recipe.spec, seed, recipe) for seed in range(self.seeds)]
        levels = *self._recorded(recipe, record), *([self._trained(recipe, trainings)] if trainings else [])
        order = {FAIL: 0, PENDING: 1, INCONCLUSIVE: 2, PASS: 3}
        worst = min(levels, key=lambda level: (order[level.state], level.level != "gradient"))
        controls = self.controls(recipe) if worst.state in (PASS, PENDING) else []
        if missed := [each.name for each in controls if each.state == "missed"]:
            reason = f"{', '.join(missed)} passed but must fail: use fewer or more steps, or other data"
            return Judgement(recipe.name, UNPROVEN, reason, levels)
        if broken := [each.result for each in controls if each.state == BROKEN]:
            cause = broken[0].sentence if broken[0] else ""
            return Judgement(recipe.name, UNPROVEN, f"{cause}: without this control, there is no verdict", levels)
        if worst.state == PASS and any(each.state == PENDING for each in controls):
            return Judgement(recipe.name, PENDING, "", levels)
        passed = "" if trainings else "forward and gradient only, not training (--seeds 0)"
        return Judgement(recipe.name, worst.state, passed if worst.state == PASS else worst.sentence, levels)

    def _controlled(self, recipe: Contender, name: str, level: str) -> ControlResult:
        if level == "training":
            jobs = [self.train(recipe.reference, seed, None, name) for seed in range(self.seeds)]
            results = [self._trained(recipe, jobs)]
        else:
            jobs = [self.record_of(self.plain(recipe), recipe, name)]
            results = [each for each in self._recorded(recipe, jobs[0]) if level in ("any", each.level)]
        failed = next((each for each in results if _is_refused(each)), None)
        ended = [self.statuses[each] for each in jobs if self.statuses[each].done]
        if any(each.state not in ("ok", NOT_FINITE) for each in ended):  # for example, the control damages nothing
            return ControlResult(name, level, BROKEN, failed or results[0])
        state = "caught" if failed else PENDING if any(each.state == PENDING for each in results) else "missed"
        return ControlResult(name, level, state, failed or results[0])

    def _recorded(self, recipe: Contender, record: Job) -> tuple[LevelResult, LevelResult]:
        """Return the results of the forward and gradient levels from a run that recorded losses and gradients."""
        rounding = [self.record_of(plain, recipe) for plain in self.plains(recipe)]
        if why := self._missing([self.record_of(recipe.reference, recipe), *rounding], [record]):
            return (LevelResult("forward", *why), LevelResult("gradient", *why))
        judged, *rounded = [self.agreement(recipe, each) for each in (record, *rounding)]
        return verdict.forward(judged, rounded, recipe.spec), verdict.gradient(judged, rounded, recipe.spec)

    def _trained(self, recipe: Contender, jobs: Sequence[Job]) -> LevelResult:
        references = [self.train(recipe.reference, seed) for seed in range(self.seeds)]
        start = self.untrained(recipe)
        if why := self._missing([*references, start], jobs):
            return LevelResult("training", *why)
        plain, judged = ([Training.read(each.run) for each in side] for side in (references, jobs))
        for before, after in zip(plain, judged, strict=True):
            problem = before.difference(after)
            if problem and jobs[0].spec.measure.control == "off":  # only its losses may show that a control is damaged
                return LevelResult("training", *problem)
        losses = [[each.held_out for each in side] for side in (plain, judged, [Training.read(start.run)])]
        return verdict.training(losses[0], losses[1], losses[2][0], recipe.spec.train.max_steps or 0)

    def _missing(self, yardsticks: Sequence[Job], judged: Sequence[Job]) -> tuple[str, str] | None:
        """Return (state, reason) of a parity level if one of its runs is pending or failed, else None. The level fails
        if a run in `judged` failed. It is inconclusive if a run of the reference or of plain bfloat16 failed."""
        for each in (*yardsticks, *judged):
            status = self.statuses[each]
            if not status.done:
                return PENDING, ""
            if status.state != "ok":
                state = INCONCLUSIVE if each in yardsticks else FAIL
                return state, f"{each.values['recipe']}, {each.values['run']}: {status.reason or status.state}"
        return None

    def agreement(self, recipe: Contender, record: Job) -> dict[str, Any]:
        """Return the comparison of a run with its reference. If agreement.json is from other runs, write it again."""
        reference = self.record_of(recipe.reference, recipe).run
        runs = [f"{run.run_id} {read_json(run.state).get('ended_at')}" for run in (reference, record.run)]
        kept = self._kept.get(record) or read_json(record.run.agreement)
        if kept.get("runs") != runs:
            kept = {"runs": runs} | agreement(reference, record.run)
            write_json(record.run.agreement, kept)
        self._kept[record] = kept
        return kept


def _is_refused(result: LevelResult) -> bool:
    """Return whether a level detected the damage: its state is `fail`, or its loss difference exceeds the limit."""
    if result.state != INCONCLUSIVE or result.number is None or result.limit is None:
        return result.state == FAIL
    return result.level == "training" and result.number > result.limit
