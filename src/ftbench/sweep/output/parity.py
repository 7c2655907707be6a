"""Show the result of a parity check as tables and as one document. parity.md and parity.json are rewritten after every
run."""

from collections.abc import Iterator
from typing import Any

from ftbench.report import formats
from ftbench.report.document import Table
from ftbench.spec.experiment import CONTROLS
from ftbench.spec.reading import as_text
from ftbench.store import rundir
from ftbench.sweep import verdict
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan.parity import Contender, Judgement, ParityPlan
from ftbench.sweep.verdict import LEVELS, LevelResult

NOTE = (
    "each level: its worst number / the limit. forward: loss per sample in nats; gradient: gradients and weight "
    "changes by tensor; training: held-out loss over all seeds in nats, as two one-sided tests"
)
WORST = 8  # tensors shown for each recipe


class ParityTables(Tables):
    """The tables of a parity check."""

    plan: ParityPlan

    def exit_code(self, code: int) -> int:
        """Return 0 only if every recipe passed."""
        return code or int(not self.plan.passed())

    def write(self) -> None:
        super().write()
        self._put("parity.md", self.markdown())
        rundir.write_json(self.folder / "parity.json", self.document())

    def markdown(self) -> str:
        title = f"# {self.folder.name}: recipes compared with the plain recipe in float32\n"
        lines = "\n".join(f"- {line}" for line in self._verdicts())
        tables = [f"## {heading.capitalize()}\n\n{formats.markdown(table)}" for heading, table in self._tables()]
        return "\n".join([title, lines + "\n", *tables])

    def terminal(self) -> str:
        tables = [f"{heading.upper()}\n{formats.terminal(table)}" for heading, table in self._tables()]
        return "\n".join([*self._verdicts(), "", *tables])

    def document(self) -> dict[str, Any]:
        """Return the result as a document for programs. Unknown values are None."""
        plan = self.plan
        return {
            "folder": str(self.folder), "seeds": plan.seeds, "passed": plan.passed(), "left": plan.left(),
            "recipes": [
                judgement.record() | {"settings": self._settings(recipe), "controls": [
                    {"name": each.name, "level": each.level, "state": each.state} for each in plan.controls(recipe)
                ]}
                for recipe, judgement in zip(plan.recipes, plan.judgements(), strict=True)
            ],
            "budgets": {name: budget.source for name, budget in verdict.BUDGETS.items()},
            "runs": self.records(),
        }  # fmt: skip

    def _verdicts(self) -> Iterator[str]:
        """Yield a line for each recipe: its verdict, the cause, and the kernels and the GPU of the run."""
        for recipe, judgement in zip(self.plan.recipes, self.plan.judgements(), strict=True):
            words = {key: as_text(value).strip('"') for key, value in self._settings(recipe).items()}
            settings = ", ".join(f"{key} {word}" for key, word in words.items())
            yield ": ".join(filter(None, [f"{recipe.name}: {judgement.verdict}", judgement.reason]))
            if settings:
                yield f"{recipe.name} was judged with {settings}"

    def _settings(self, recipe: Contender) -> dict[str, Any]:
        """Return kernels, casts, commit and GPU of the run that was compared, as its files have them."""
        if recipe.refused:
            return {}
        run = self.plan.record_of(recipe.spec, recipe).run
        applied, machine = rundir.read_json(run.applied), rundir.read_json(run.machine)
        if "optimizer" not in applied:
            return {}
        optimizations = {name: value for name, value in recipe.spec.optimizations if value not in (False, "off", 0)}
        commit, gpu = (machine.get("ftbench") or {}).get("commit"), rundir.first_gpu(machine).get("name")
        return {
            "kernels": recipe.spec.optimizations.triton_kernels, "fp8": recipe.spec.optimizations.fp8,
            "precision": applied.get("product_precision"), "attention": applied.get("model", {}).get("attention"),
            "optimizer": applied["optimizer"].get("class"), "optimizations": " ".join(optimizations) or "none",
            "commit": (commit or "unknown")[:12], "gpu": gpu or "none",
        }  # fmt: skip

    def _tables(self) -> Iterator[tuple[str, Table]]:
        judgements = self.plan.judgements()
        yield "recipes", Table({}, ["recipe", "verdict", *LEVELS], [_row(each) for each in judgements], [NOTE], LEVELS)
        controls = [
            [recipe.name, each.name, CONTROLS[each.name], each.level, each.state.upper() if each.state == "missed"
             else each.state, _figures(each.result)]
            for recipe in self.plan.recipes for each in self.plan.controls(recipe)
        ]  # fmt: skip
        headings = ["recipe", "control", "damage", "level", "state", "number / limit"]
        yield "controls", Table({}, headings, controls, [], tuple(headings))
        if worst := [row for recipe in self.plan.recipes for row in self._worst(recipe)]:
            yield "worst tensors", Table({}, ["recipe", "tensor", "error", "limit"], worst, [], ("tensor",))

    def _worst(self, recipe: Contender) -> Iterator[list[str]]:
        """Yield the checks of a recipe's tensors that are nearest to or furthest beyond their limits."""
        plan = self.plan
        if recipe.refused or plan.standings[record := plan.record_of(recipe.spec, recipe)].state != "ok":
            return
        needed = [plan.record_of(recipe.reference, recipe)]
        needed += [plan.record_of(plan.plain(recipe), recipe)] if verdict.rounds(recipe.spec) else []
        if any(plan.standings[each].state != "ok" for each in needed):
            return
        rounding = [plan.agreement(recipe, each) for each in needed[1:]]
        checks = verdict.tensor_checks(plan.agreement(recipe, record), rounding, recipe.spec)
        for check in sorted(checks, key=lambda check: -check.share)[:WORST]:
            what = check.what.removeprefix("base_model.model.").replace(".default", "").replace(".weight:", ":")
            yield [recipe.name, what, f"{check.number:.2g}", f"{check.limit:.2g}"]


def _row(judgement: Judgement) -> list[str]:
    levels = {level.level: f"{level.state} {_figures(level)}".strip() for level in judgement.levels}
    return [judgement.name, judgement.verdict, *(levels.get(name, "") for name in LEVELS)]


def _figures(result: LevelResult | None) -> str:
    if result is None or result.number is None or result.limit is None:
        return ""
    return f"{result.number:.2g} / {result.limit:.2g}"
