"""What a parity check says: a verdict a recipe, the controls, how well gradients agree; as tables, as one document, and
as the files parity.md and parity.json, which are written again after every run."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ftbench.core import units
from ftbench.core.table import folded
from ftbench.report.render import formats
from ftbench.report.render.document import Table, table_of_rows
from ftbench.store import rundir
from ftbench.sweep.gradients import agreement
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan.parity import Contender, ParityPlan, caught

FIGURES = {"Δ loss": "change", "Δ held-out loss": "held_out_change", "learned": "learned",
           "Δ gradient norm": "grad_norm_change", "tolerance": "tolerance"}  # fmt: skip
HEADINGS = ["recipe", "verdict", *FIGURES, "why"]
GRADIENTS = ["recipe", "module", "cosine", "lowest", "of layer", "norm ratio"]
NOTE = (
    "Δ: of the mean loss a label token over the same samples, the seed that differs most; learned: the least share of "
    "its loss that the reference learned beyond chance. A reference that learned no more than the tolerance, or than "
    "its seeds differ by, cannot tell."
)
GRADIENT_NOTE = "lowest: the layer whose gradient agrees least; norm ratio: the recipe's over the reference's"


class ParityTables(Tables):
    """The tables of a parity check."""

    plan: ParityPlan

    def exit_code(self, code: int) -> int:
        """Return 0 only where every recipe follows and every control was caught."""
        return code or int(not self.plan.passed())

    def write(self) -> None:
        super().write()
        self._put("parity.md", self.markdown())
        rundir.write_json(self.folder / "parity.json", self.document())

    def markdown(self) -> str:
        title = f"# {self.folder.name}: what each recipe learns, against {self.plan.reference.name}\n"
        tables = [f"## {heading.capitalize()}\n\n{formats.markdown(table)}" for heading, table in self._tables()]
        return "\n".join([title, *tables, self._sentence()]) + "\n"

    def terminal(self) -> str:
        tables = [f"{heading.upper()}\n{formats.terminal(table)}" for heading, table in self._tables()]
        return "\n".join([*tables, folded(self._sentence())]) + "\n"

    def document(self) -> dict[str, Any]:
        """Return all of it, for programs; what is unknown is None."""
        plan, spread = self.plan, self.plan.spread()
        return {
            "folder": str(self.folder), "against": plan.reference.name, "seeds": plan.count,
            "steps": plan.reference.spec.train.max_steps, "passed": plan.passed(), "left": plan.left(),
            "spread": dataclasses.asdict(spread) if spread else None,
            "recipes": [judgement.record() for judgement in plan.judgements()],
            "controls": [judgement.record() | {"caught": caught(judgement)} for judgement in plan.controls()],
            "gradients": {recipe.name: self._agreement(recipe) for recipe in self._comparable()},
            "runs": self.records(),
        }  # fmt: skip

    def _tables(self) -> Iterator[tuple[str, Table]]:
        notes = [NOTE]
        if spread := self.plan.spread():
            shares = f"{_share(spread.train)} in training and by {_share(spread.held_out)} on what was held out"
            notes.append(f"seeds of the reference differ by {shares}")
        yield "recipes", _table([judgement.record() for judgement in self.plan.judgements()], notes)
        controls = [(judgement.record(), caught(judgement)) for judgement in self.plan.controls()]
        words = {True: "caught", False: "NOT CAUGHT"}
        yield "controls", _table([row | {"verdict": words[ok]} if row["seeds"] else row for row, ok in controls], [])
        if agreements := {recipe.name: self._agreement(recipe) for recipe in self._comparable()}:
            rows = [[name, *_cells(row)] for name, result in agreements.items() for row in result["modules"]]
            reasons = [f"{name}: not compared, {a['reason']}" for name, a in agreements.items() if a["reason"]]
            yield "gradients of the first steps", Table({}, GRADIENTS, rows, [GRADIENT_NOTE, *reasons], ("module",))

    def _comparable(self) -> list[Contender]:
        """Return the recipes whose first run, with the gradients, has ended well, where the reference's has."""
        able = [self.plan.reference, *(recipe for recipe in self.plan.recipes if not recipe.refused)]
        ended = [recipe for recipe in able if self.plan.standings[self.plan.job(recipe, 0)].state == "ok"]
        return ended[1:] if ended[:1] == able[:1] and self.plan.gradients else []

    def _agreement(self, recipe: Contender) -> dict[str, Any]:
        if not self.plan.same_steps(recipe):
            return {"modules": [], "reason": "its steps hold other samples"}
        rows, reason = agreement(*(self.plan.job(each, 0).run for each in (self.plan.reference, recipe)))
        return {"modules": [dataclasses.asdict(row) for row in rows], "reason": reason or None}

    def _sentence(self) -> str:
        if left := self.plan.left():
            return f"{units.some(left, 'run')} still to come."
        missed = [control for control in self.plan.controls() if not caught(control)]
        if failed := [control.reason for control in missed if not control.seeds]:
            return f"Without its controls the check proves nothing: {failed[0]}."
        if missed:
            names = ", ".join(control.name.replace("_", " ") for control in missed)
            return (
                f"The check could not have failed: {names} passed it. Give it data that can be learned "
                "(dataset.structure: markov, or your own with a model that has learned something) or more steps."
            )
        return "Every control was caught: a recipe that does not learn what the reference learns would have been too."


def _table(records: Sequence[Mapping[str, Any]], notes: list[str]) -> Table:
    """Return a row a record, without the columns that no row fills."""
    headings = [
        name for name in HEADINGS if name not in FIGURES or any(row[FIGURES[name]] is not None for row in records)
    ]
    rows = [
        {"recipe": row["name"].replace("_", " "), "verdict": row["verdict"], "why": row["reason"] or ""}
        | {name: _share(row[key], signed=name.startswith("Δ")) for name, key in FIGURES.items()}
        for row in records
    ]
    return table_of_rows(rows, notes, ("recipe", "verdict", "why"), headings)


def _cells(row: Mapping[str, Any]) -> list[str]:
    layer = "" if row["layer"] is None else str(row["layer"])
    return [row["module"], f"{row['cosine']:.4f}", f"{row['lowest']:.4f}", layer, f"{row['norm_ratio']:.3f}"]


def _share(share: float | None, *, signed: bool = False) -> str:
    """Return a share with two digits that tell."""
    return "" if share is None else units.difference(share).removeprefix("" if signed else "+")
