"""The tables of an ablation: variants, combinations, and the best combination as lines for a spec."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ftbench.core import units
from ftbench.core.learning import Learning
from ftbench.report import formats
from ftbench.report.compare.pairs import Pair
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
from ftbench.report.data.cells import PEAK, TOKENS, Cell
from ftbench.report.document import Table, table_of_rows
from ftbench.spec import ablation
from ftbench.spec.ablation import PLAIN
from ftbench.spec.reading import as_text
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan.ablation import AblationPlan

ABLATION = "ablation.md"
_TEXT = ("variant", "against", "Δ speed", "peak GiB (Δ)", "first step (Δ)", "Δ loss", "break-even", "state")
NOTE = (
    "Δ speed: real tokens per second with a simultaneous 95 % interval. With several runs per side it comes from their "
    "spread, with one run from its steps and the spread between equal runs (likely at most). ≈: not distinguishable; "
    "?: no interval. Peak: tensors on the GPU (on a CPU: the process). Δ loss: mean over the same samples, with the "
    "tolerance, and the gradient norm. Break-even: steps until a slow start has paid off."
)


class AblationTables(Tables):
    """The tables of an ablation."""

    plan: AblationPlan

    def write(self) -> None:
        super().write()
        self._put(ABLATION, self.markdown())

    def markdown(self) -> str:
        """Return the text of ablation.md."""
        parts = [f"# {self.folder.name}: the gain of each optimization\n"]
        if left := self.plan.left():
            parts.append(f"{units.some(left, 'run')} still to come.\n")
        parts.append("## One at a time\n\n" + formats.markdown(self.variants()))
        if combinations := self.combinations():
            parts.append("## Together\n\n" + formats.markdown(combinations))
        best = "\n\n".join(self.verdict("```yaml\n{}```\n"))
        refused = self._refusals("- ")
        parts.append("\n".join([f"## Best\n\n{best}", *(["## Impossible\n", *refused] if refused else [])]))
        return "\n".join(parts).rstrip("\n") + "\n"

    def terminal(self) -> str:
        parts = ["ONE AT A TIME\n" + formats.terminal(self.variants())]
        if combinations := self.combinations():
            parts.append("TOGETHER\n" + formats.terminal(combinations))
        return "\n".join([*parts, *self.verdict("\n{}"), *self._refusals("impossible  ")]) + "\n"

    def _refusals(self, before: str) -> list[str]:
        return [f"{before}{what}: {reason}" for what, reason in self._impossible]

    def variants(self) -> Table:
        """Return the plain recipe and all variants, each compared with its baseline."""
        plan = self.plan
        rows = [_row(PLAIN, "", plan.cell({}), None, plan.state({}))]
        rows += [
            _row(variant.name, variant.over, plan.cell(variant.changes),
                 plan.pair(variant.changes, plan.over(variant)), plan.state(variant.changes))
            for variant in plan.start.variants if variant.name not in plan.refused
        ]  # fmt: skip
        return _table(rows, [NOTE, *self._outside()])

    def combinations(self) -> Table | None:
        """Return all tested combinations, each compared with the settings kept before."""
        plan, rows = self.plan, []
        for each in plan.combinations:
            added = {key: value for key, value in each.changes.items() if each.over.get(key) != value}
            pair = plan.pair(each.changes, each.over)
            kept = "kept, likely" if plan.likely else "kept"
            state = kept if each.kept else f"not kept: {each.reason}"
            rows.append(_row(f"+ {ablation.label(added)}", "", plan.cell(each.changes), pair, state))
        return _table(rows, ["each row is compared with all rows that were kept above it"]) if rows else None

    def _outside(self) -> Iterator[str]:
        for variant in self.plan.start.variants:
            pair = self.plan.pair(variant.changes, {})
            if pair and pair.learning and pair.learning.failed:
                yield f"{variant.name} does not learn the same as the plain recipe: {pair.learning.reason}"

    def verdict(self, lines: str) -> list[str]:
        """Return sentences about the best combination, and its settings formatted with `lines`."""
        plan = self.plan
        if not plan.cell({}) or not (plain := plan.cell({})) or not plain.ok:
            return [f"The plain recipe has no result ({plan.state({})}), so nothing can be compared with it."]
        pending = " so far" if plan.left() else ""
        if pending and not plan.combinations:
            return [f"{units.some(plan.left(), 'run')} left before combinations are tested."]
        if not plan.best:
            return [f"Nothing{pending} is better than the plain recipe for {plan.start.objective}."]
        pair = plan.pair(plan.best, {})
        likely = " (likely: one run per side; use --repeats 3)" if plan.likely else ""
        sentences = [f"Best for {plan.start.objective}{pending}: {ablation.label(plan.best)}{likely}"]
        if pair:
            sentences.append(
                f"Compared with the plain recipe: speed {change(pair.speed)}, peak GiB {_change_of_peak(pair)}, loss "
                f"{_loss(pair.learning)}"
            )
        if plan.start.spec.launch.mock != "off":
            sentences.append("launch.mock: nothing was trained, and all figures are invented.")
        return [*sentences, lines.format(spec_lines(ablation.by_section(plan.best)))]

    def document(self) -> dict[str, Any]:
        """Return the document for `--json`. Unknown values are None."""
        plan = self.plan
        variants = [
            _record(each.name, plan.cell(each.changes), plan.pair(each.changes, plan.over(each)))
            | {"against": each.over, "reason": plan.refused.get(each.name) or plan.state(each.changes) or None}
            for each in plan.start.variants
        ]
        combinations = [
            _record(each.name, plan.cell(each.changes), plan.pair(each.changes, each.over))
            | {"against": ablation.label(each.over), "kept": each.kept, "reason": each.reason or None}
            for each in plan.combinations
        ]
        best = _record(ablation.label(plan.best), plan.cell(plan.best), plan.pair(plan.best, {}))
        return {
            "folder": str(self.folder), "objective": plan.start.objective, "left": plan.left(),
            "plain": _record(PLAIN, plan.cell({}), None) | {"reason": plan.state({}) or None},
            "variants": variants, "combinations": combinations, "best": best | {"changes": dict(plan.best)},
            "runs": self.records(),
        }  # fmt: skip


def spec_lines(sections: Mapping[str, Any]) -> str:
    """Return sections of a spec as YAML lines."""
    lines = []
    for section, values in sections.items():
        inner = values if isinstance(values, dict) else {}
        lines.append(f"{section}:" if inner else f"{section}: {as_text(values)}")
        lines += [f"  {name}: {as_text(value)}" for name, value in inner.items()]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Mapping[str, str]], notes: Sequence[str]) -> Table:
    """Return the table without empty columns."""
    filled = [name for name in rows[0] if name in ("variant", "state") or any(row[name] for row in rows)]
    return table_of_rows(rows, notes, _TEXT, filled)


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
