"""`ftbench ablate`: train the plain recipe without and with each optimization, and compare the speeds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.errors import MissingError, SpecError
from ftbench.launch import checks, runner
from ftbench.report.compare import comparison, pairs
from ftbench.report.data.axes import RECIPE
from ftbench.report.data.collect import Record
from ftbench.report.data.groups import runs_of
from ftbench.report.document import Section, Table
from ftbench.spec import ablation
from ftbench.spec.ablation import Changes, Variant
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.incompatibilities import KERNELS
from ftbench.spec.load import load
from ftbench.spec.model_argument import spec_text
from ftbench.store.rundir import first_gpu
from ftbench.sweep import sweep
from ftbench.sweep.gpu_slots import local_slots
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan.base import FAILED, Job, JobStatus, Options, PlanRequest, job
from ftbench.sweep.plan.grid import Grid


@dataclass(frozen=True, kw_only=True)
class AblationRequest(PlanRequest):
    """Options of `ftbench ablate`. `only` has names of optimizations or variants; if empty, all are tried."""

    steps: int | None = None
    repeats: int = 3
    only: Sequence[str] = ()


def prepare(request: AblationRequest) -> sweep.Ready:
    """Plan an ablation without starting its runs. Raise SpecError or MissingError if the plain recipe cannot run."""
    sets = [*request.sets, *([] if request.steps is None else [f"train.max_steps={request.steps}"])]
    spec = load(request.spec, [*sets, f"measure.repeats={request.repeats}"])
    checks.check_disk(request.out)
    slots = local_slots((), mock=spec.launch.mock != "off")
    described = runner.describe(spec, slots[0].visible)
    capability, fix = checks.capability(described), f"To measure without the kernels, add --set {KERNELS}=off"
    plain = resolve(ablation.plain_spec(spec), capability)
    checks.check(plain, described)
    variants = ablation.variants(plain.train.optimizer, request.only, plain.method.name == "full")
    recipe = [f"recipe={ablation.PLAIN}", f"train.optimizer={plain.train.optimizer}"]
    options = request.options(request.out / runner.experiment(plain), runner.gpu_name(described), (*sets, *recipe))
    plan = AblationPlan(plain, variants, lambda variant: _refused(variant, described), options)
    return sweep.Ready(
        request, spec_text(request.spec), plan, slots, first_gpu(described) or None, list(plan.refused.items()),
        sweep.without_kernels([("", spec)], capability, fix), AblationTables,
    )  # fmt: skip


def _refused(spec: Experiment, described: dict[str, Any]) -> str | None:
    """Return the reason why a spec cannot run on this machine. Return None for a spec that can run."""
    if problems := checks.problems(spec, described):
        return "; ".join(problems)
    try:
        checks.check_needed(spec)
    except (SpecError, MissingError) as error:
        return str(error)
    return None


class AblationPlan(Grid):
    """The plan of an ablation: `spec.measure.repeats` runs of the plain `spec` and of each of its `variants`.

    The function `refused` returns the reason why a spec cannot run on this machine, or None."""

    def __init__(
        self, spec: Experiment, variants: Sequence[Variant], refused: Callable[[Experiment], str | None],
        options: Options,
    ) -> None:  # fmt: skip
        self.spec, self.options = spec, options
        every = [{}, *(variant.changes for variant in variants)]
        reasons = {ablation.label(each): refused(ablation.with_changes(spec, each)) for each in every}
        self.refused = {name: reason for name, reason in reasons.items() if reason}
        allowed = [each for each in every if ablation.label(each) not in self.refused]
        repeats = range(1, spec.measure.repeats + 1)
        super().__init__([self._job(each, repeat) for repeat in repeats for each in allowed], {}, options)
        self._skip_repeats()

    def _job(self, changes: Changes, repeat: int) -> Job:
        spec, name = ablation.with_changes(self.spec, changes), ablation.label(changes)
        sets = (*self.options.sets, *ablation.settings(changes.items()))
        return job(spec, sets, {"variant": name}, repeat, self.options.folder, self.options.gpu)

    def ended(self, job: Job) -> None:
        super().ended(job)
        self._skip_repeats()

    def _skip_repeats(self) -> None:
        """Skip the remaining repeats of each cell that has a failed run."""
        failed = {each.cell: each.repeat for each, status in self.statuses.items() if status.state in FAILED}
        for each in self.pending():
            if each.cell in failed:
                self.statuses[each] = JobStatus("skipped", f"repeat {failed[each.cell]} failed")


class AblationTables(Tables):
    """The tables of an ablation. They compare each variant with the plain recipe."""

    def sections(self, runs: Sequence[Record]) -> Iterator[tuple[str, Table]]:
        if (compared := _compared(runs)) and compared.table:
            yield "gain of each optimization", compared.table

    def answer(self, runs: Sequence[Record]) -> dict[str, Any]:
        compared = _compared(runs)
        return {"variants": compared.records if compared else []}


def _compared(runs: Sequence[Record]) -> Section | None:
    """Return a comparison of the variants with the plain recipe. Return None if there is nothing to compare yet."""
    try:
        return comparison.section(pairs.compare(runs_of(runs), RECIPE, one_sitting=True)) if runs else None
    except SpecError:
        return None
