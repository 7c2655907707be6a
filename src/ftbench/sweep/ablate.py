"""`ftbench ablate`: run the plain recipe and each optimization alone, with interleaved repeats, and compare them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.core import units
from ftbench.core.learning import Learning
from ftbench.errors import MissingError, SpecError
from ftbench.launch import checks, runner
from ftbench.report import formats
from ftbench.report.compare.pairs import Noise, Pair, noise_of, pair_of
from ftbench.report.compare.words import (
    break_even_text,
    change,
    first_step_of,
    first_step_text,
    flat_learning,
    flat_ratio,
    grad_norm_text,
    learning_text,
)
from ftbench.report.data.axes import OPTIMIZATIONS
from ftbench.report.data.cells import PEAK, TOKENS, Cell
from ftbench.report.data.collect import records
from ftbench.report.data.groups import cells_of, runs_of
from ftbench.report.document import Table, table_of_rows
from ftbench.spec import ablation
from ftbench.spec.ablation import PLAIN, Changes, Variant
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.incompatibilities import require_published
from ftbench.spec.load import load
from ftbench.spec.model_argument import spec_text
from ftbench.store.rundir import first_gpu
from ftbench.store.summary import read_summary
from ftbench.sweep import sweep
from ftbench.sweep.gpu_slots import local_slots
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan.base import FAILED, Job, Options, PlanRequest, Standing, job
from ftbench.sweep.plan.grid import Grid

ABLATION = "ablation.md"
_TEXT = ("variant", "against", "Δ speed", "peak GiB (Δ)", "first step (Δ)", "Δ loss", "break-even", "state")
NOTE = (
    "Δ speed: real tokens per second with a simultaneous 95 % interval. With several runs per side it comes from their "
    "spread, with one run from its steps and the spread between equal runs (likely at most). ≈: not distinguishable; "
    "?: no interval. Peak: tensors on the GPU (on a CPU: the process). Δ loss: mean over the same samples, with the "
    "tolerance, and the gradient norm. Break-even: steps until a slow start has paid off."
)


@dataclass(frozen=True, kw_only=True)
class AblationRequest(PlanRequest):
    """Command line of an ablation. `only` names optimizations or variants."""

    steps: int | None = None
    repeats: int = 3
    only: Sequence[str] = ()


def prepare(request: AblationRequest) -> sweep.Ready:
    """Build the plan without starting runs. Raise SpecError and MissingError for invalid or missing things."""
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
    recipe = [f"recipe={ablation.PLAIN}", f"train.optimizer={plain.train.optimizer}"]
    options = request.options(request.out / runner.experiment(plain), runner.gpu_name(described), (*sets, *recipe))
    plan = AblationPlan(plain, variants, lambda variant: _refused(variant, described), options)
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


class AblationPlan(Grid):
    """The runs of the plain `spec`, with its number of repeats, and of its `variants`. `refused` returns why a spec
    cannot run on this machine, or None."""

    def __init__(
        self, spec: Experiment, variants: Sequence[Variant], refused: Callable[[Experiment], str | None],
        options: Options,
    ) -> None:  # fmt: skip
        self.spec, self.variants, self.options = spec, variants, options
        self._cells: dict[str, Cell] = {}
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

    def _jobs(self, changes: Changes) -> list[Job]:
        return [self._job(changes, repeat) for repeat in range(1, self.spec.measure.repeats + 1)]

    def ended(self, job: Job) -> None:
        super().ended(job)
        self._cells.pop(job.cell, None)
        self._skip_repeats()

    def _skip_repeats(self) -> None:
        """Skip the other repeats of a failed run."""
        failed = {each.cell: each.repeat for each, now in self.standings.items() if now.state in FAILED}
        for each in self.pending():
            if each.cell in failed:
                self.standings[each] = Standing("skipped", f"repeat {failed[each.cell]} failed")

    def cell(self, changes: Changes) -> Cell | None:
        """Return the finished runs of a variant; None before the first one."""
        jobs = self._jobs(changes)
        name = jobs[0].cell
        if name not in self._cells:
            ran = [each for each in jobs if (now := self.standings.get(each)) and now.done and now.state != "skipped"]
            if not ran:
                return None
            rows = records(read_summary(each.run) | {"path": str(each.run.path)} for each in ran)
            self._cells[name] = cells_of(runs_of(rows))[-1]  # the newest, if the tokens have changed
        return self._cells[name]

    def state(self, changes: Changes) -> str:
        """Return the state of a variant's first run if no run has a result, else an empty string."""
        standings = [self.standings.get(each) for each in self._jobs(changes)]
        if any(now and now.state == "ok" for now in standings):
            cell = self.cell(changes)
            return cell.state if cell and not cell.ok else ""
        return next((f"{now.state}: {now.reason}" if now.reason else now.state for now in standings if now), "not run")

    def pair(self, variant: Variant, plain: bool = False) -> Pair | None:
        """Return a variant compared with the one that it is added to, or with `plain`; None before both have run."""
        over = next((other.changes for other in self.variants if other.name == variant.over and not plain), {})
        cell, baseline = self.cell(variant.changes), self.cell(over)
        return pair_of(OPTIMIZATIONS, cell, baseline, noise=self._noise()) if cell and baseline else None

    def _noise(self) -> Noise:
        """Return the noise between equal runs, corrected for the number of variants: 1 of 20 would help by chance."""
        variants = [variant.changes for variant in self.variants if variant.name not in self.refused]
        cells = [cell for changes in ({}, *variants) if (cell := self.cell(changes)) is not None]
        return noise_of(cells, max(1, len(variants)), sittings=False)  # an ablation is one sitting


class AblationTables(Tables):
    """The table of an ablation."""

    plan: AblationPlan

    def write(self) -> None:
        super().write()
        self._put(ABLATION, self.markdown())

    def markdown(self) -> str:
        """Return the text of ablation.md."""
        left = self.plan.left()
        parts = [f"# {self.folder.name}: the gain of each optimization\n"]
        parts += [f"{units.some(left, 'run')} still to come.\n"] if left else []
        parts += [formats.markdown(self.variants())]
        if self._impossible:
            parts.append("\n".join(["## Impossible\n", *self._refusals("- ")]) + "\n")
        return "\n".join(parts)

    def terminal(self) -> str:
        return "\n".join([formats.terminal(self.variants()), *self._refusals("impossible  ")]).rstrip("\n") + "\n"

    def _refusals(self, before: str) -> list[str]:
        return [f"{before}{what}: {reason}" for what, reason in self._impossible]

    def variants(self) -> Table:
        """Return the plain recipe and all variants, each compared with its baseline."""
        plan = self.plan
        rows = [_row(PLAIN, "", plan.cell({}), None, plan.state({}))]
        rows += [
            _row(each.name, each.over, plan.cell(each.changes), plan.pair(each), plan.state(each.changes))
            for each in plan.variants if each.name not in plan.refused
        ]  # fmt: skip
        filled = [name for name in rows[0] if name in ("variant", "state") or any(row[name] for row in rows)]
        return table_of_rows(rows, [NOTE, *self._notes()], _TEXT, filled)

    def _notes(self) -> Iterator[str]:
        plan = self.plan
        if (plain := plan.cell({})) is None or not plain.ok:
            yield f"The plain recipe has no result ({plan.state({})}), so nothing can be compared with it."
        for variant in plan.variants:
            pair = plan.pair(variant, plain=True)
            if pair and pair.learning and pair.learning.failed:
                yield f"{variant.name} does not learn the same as the plain recipe: {pair.learning.reason}"
        if plan.spec.launch.mock != "off":
            yield "launch.mock: nothing was trained, and all figures are invented."

    def document(self) -> dict[str, Any]:
        """Return the document for `--json`. Unknown values are None."""
        plan = self.plan
        variants = [
            _record(each.name, plan.cell(each.changes), plan.pair(each))
            | {"against": each.over, "reason": plan.refused.get(each.name) or plan.state(each.changes) or None}
            for each in plan.variants
        ]
        return {
            "folder": str(self.folder), "left": plan.left(), "variants": variants, "runs": self.records(),
            "plain": _record(PLAIN, plan.cell({}), None) | {"reason": plan.state({}) or None},
        }  # fmt: skip


def _row(name: str, over: str, cell: Cell | None, pair: Pair | None, state: str) -> dict[str, str]:
    paired = pair if pair and pair.cell.ok and pair.baseline and pair.baseline.ok else None
    return {
        "variant": name,
        "Δ speed": change(paired.speed) if paired else "",
        "tokens/s": units.rate(cell.figure(TOKENS)) if cell else "",
        "peak GiB (Δ)": _with_change(units.gibibytes(cell.figure(PEAK)), _change_of_peak(paired)) if cell else "",
        "Δ loss": _loss(pair.learning) if pair else "",
        "state": state or (cell.state if cell else ""), "against": over,
        "first step (Δ)": first_step_text(cell, paired) if cell else "",
        "break-even": break_even_text(paired.break_even) if paired else "",
    }  # fmt: skip


def _with_change(text: str, changed: str) -> str:
    return f"{text} ({changed})" if text and changed else text


def _difference(pair: Pair, name: str) -> float | None:
    """Return candidate minus baseline, or None if one is unknown."""
    figures = [side.figure(name) if side else None for side in (pair.cell, pair.baseline)]
    return None if figures[0] is None or figures[1] is None else figures[0] - figures[1]


def _change_of_peak(pair: Pair | None) -> str:
    difference = _difference(pair, PEAK) if pair else None
    if pair is None or difference is None or pair.memory is None:
        return ""
    return f"{'-' if difference < 0 else '+'}{units.gibibytes(abs(difference))}, {(pair.memory.value - 1) * 100:+.1f} %"


def _loss(learning: Learning | None) -> str:
    """Return the verdict with the differences of mean loss and gradient norm."""
    norm = grad_norm_text(learning)
    return learning_text(learning) + (f", gradient norm {norm}" if norm else "")


def _record(name: str, cell: Cell | None, pair: Pair | None) -> dict[str, Any]:
    return {
        "name": name,
        "tokens_per_s": cell.figure(TOKENS) if cell else None,
        "peak_gb": cell.figure(PEAK) if cell else None,
        **(first_step_of(cell) if cell else {}),
        "runs_ok": len(cell.ok) if cell else 0,
        **flat_ratio("speed", pair.speed if pair else None),
        **flat_ratio("memory", pair.memory if pair else None),
        "memory_change_gb": _difference(pair, PEAK) if pair else None,
        "break_even": pair.break_even.when if pair and pair.break_even else None,
        "break_even_steps": pair.break_even.steps if pair and pair.break_even else None,
        **flat_learning(pair.learning if pair else None),
        "run_ids": [run.run_id for run in cell.runs] if cell else [],
    }
