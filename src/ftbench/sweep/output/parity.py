"""What a parity check says: a verdict a recipe, the controls, how well gradients agree; as tables, as one document, and
as the files parity.md and parity.json, which are written again after every run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ftbench.core.learning import Learning
from ftbench.report.render import formats
from ftbench.report.render.document import Table
from ftbench.store import rundir
from ftbench.sweep.gradients import Agreement, agreement
from ftbench.sweep.output.table import Tables
from ftbench.sweep.plan.parity import Contender, Judgement, ParityPlan, caught

HEADINGS = ["recipe", "verdict", "Δ loss", "Δ held-out loss", "learned", "Δ gradient norm", "tolerance", "why"]
GRADIENTS = ["recipe", "module", "cosine", "lowest", "of layer", "norm ratio"]
NOTE = (
    "Δ: of the mean loss a label token over the same samples, the seed that differs most; learned: the least share of "
    "its loss that the reference learned beyond chance. A reference that learned no more than the tolerance, or than "
    "its seeds differ by, cannot tell."
)


class ParityTables(Tables):
    """The tables of a parity check."""

    plan: ParityPlan

    def exit_code(self, code: int) -> int:
        """Return 0 only where every recipe follows and every control was caught."""
        return code or int(not self.plan.passed())

    def write(self) -> None:
        super().write()
        rundir.write_text(self.folder / "parity.md", self.markdown())
        rundir.write_json(self.folder / "parity.json", self.document())

    def markdown(self) -> str:
        tables = [f"## {heading.capitalize()}\n\n{formats.markdown(table)}" for heading, table in self._tables()]
        return "\n".join([f"# {self._title()}\n", *tables, self._sentence()]) + "\n"

    def terminal(self) -> str:
        tables = [f"{heading.upper()}\n{formats.terminal(table)}" for heading, table in self._tables()]
        return "\n".join([*tables, formats.folded(self._sentence())]) + "\n"

    def _title(self) -> str:
        return f"{self.folder.name}: what each recipe learns, against {self.plan.reference.name}"

    def _tables(self) -> list[tuple[str, Table]]:
        band = self.plan.band()
        notes = [NOTE]
        if band:
            notes.append(
                f"seeds of the reference differ by {_percent(band.train)} in training and by {_percent(band.held_out)} "
                "on what was held out"
            )
        rows = [_row(found, found.verdict) for found in self.plan.judgements()]
        words = {True: "caught", False: "NOT CAUGHT"}
        controls = [
            _row(found, words[caught(found)] if found.seeds else found.verdict) for found in self.plan.controls()
        ]
        tables = [("recipes", _table(rows, notes)), ("controls", _table(controls, []))]
        if gradients := self._gradients():
            tables.append(("gradients of the first steps", gradients))
        return tables

    def _gradients(self) -> Table | None:
        rows, notes = (
            [],
            ["lowest: the layer whose gradient agrees least; norm ratio: the recipe's over the reference's"],
        )
        for recipe in self._agreeable():
            agreements, reason = self._agreement(recipe)
            rows += [[recipe.name, *_cells(row)] for row in agreements]
            notes += [f"{recipe.name}: not compared, {reason}"] if reason else []
        return Table({}, GRADIENTS, rows, notes, ("recipe", "module")) if rows or len(notes) > 1 else None

    def _agreeable(self) -> list[Contender]:
        """Return the recipes whose first run, and the reference's, have ended well."""

        def ok(recipe: Contender) -> bool:
            return self.plan.standings[self.plan.job(recipe, 0)].state == "ok"

        runnable = [recipe for recipe in self.plan.recipes if not recipe.refused]
        return [recipe for recipe in runnable if self.plan.gradients and ok(recipe) and ok(self.plan.reference)]

    def _agreement(self, recipe: Contender) -> tuple[list[Agreement], str]:
        if not self.plan.same_steps(recipe):
            return [], "its steps hold other samples"
        return agreement(self.plan.job(self.plan.reference, 0).run, self.plan.job(recipe, 0).run)

    def _sentence(self) -> str:
        if left := self.plan.left():
            return f"{left} runs are still to come."
        missed = [found.name.replace("_", " ") for found in self.plan.controls() if not caught(found)]
        if missed:
            return (
                f"The check could not have failed: {', '.join(missed)} passed it. Give it data that can be learned "
                "(dataset.structure: markov, or your own with a model that has learned something) or more steps."
            )
        return "Every control was caught: a recipe that does not learn what the reference learns would have been too."

    def document(self) -> dict[str, Any]:
        """Return all of it, for programs; what is unknown is None."""
        plan, band = self.plan, self.plan.band()
        return {
            "folder": str(self.folder), "against": plan.reference.name, "seeds": plan.count,
            "steps": plan.reference.spec.train.max_steps, "passed": plan.passed(),
            "left": plan.left(),
            "band": dataclasses.asdict(band) if band else None,
            "recipes": [_record(found) for found in plan.judgements()],
            "controls": [_record(found) | {"caught": caught(found)} for found in plan.controls()],
            "gradients": {recipe.name: self._gradient_record(recipe) for recipe in self._agreeable()},
            "runs": self.records(),
        }  # fmt: skip

    def _gradient_record(self, recipe: Contender) -> dict[str, Any]:
        rows, reason = self._agreement(recipe)
        return {"modules": [dataclasses.asdict(row) for row in rows], "reason": reason or None}


def _table(rows: Sequence[list[str]], notes: Sequence[str]) -> Table:
    filled = [i for i, heading in enumerate(HEADINGS) if heading in HEADINGS[:2] or any(row[i] for row in rows)]
    return Table({}, [HEADINGS[i] for i in filled], [[row[i] for i in filled] for row in rows], [*notes],
                 ("recipe", "verdict", "why"))  # fmt: skip


def _row(found: Judgement, verdict: str) -> list[str]:
    norms = [seed.grad_norm for seed in found.seeds if seed.grad_norm is not None]
    return [
        found.name.replace("_", " "), verdict, _percent(found.worst, "+"), _percent(found.worst_held_out, "+"),
        _percent(found.learned), _percent(max(norms, key=abs, default=None), "+"), _percent(found.tolerance),
        found.reason,
    ]  # fmt: skip


def _cells(row: Agreement) -> list[str]:
    layer = "" if row.layer is None else str(row.layer)
    return [row.module, f"{row.cosine:.4f}", f"{row.lowest:.4f}", layer, f"{row.norm_ratio:.3f}"]


def _percent(share: float | None, sign: str = "") -> str:
    """Return a share with two digits that tell; NaN and infinity as they are."""
    if share is None:
        return ""
    return f"{share * 100:{sign}.0f} %" if 0.1 <= abs(share) < math.inf else f"{share * 100:{sign}.2g} %"


def _record(found: Judgement) -> dict[str, Any]:
    return {
        "name": found.name, "verdict": found.verdict, "reason": found.reason or None, "tolerance": found.tolerance,
        "change": _finite(found.worst), "held_out_change": _finite(found.worst_held_out), "learned": found.learned,
        "seeds": [_seed(seed) for seed in found.seeds], "held_out_changes": [_finite(x) for x in found.held_out],
    }  # fmt: skip


def _seed(seed: Learning) -> dict[str, Any]:
    return {
        key: _finite(value) if isinstance(value, float) else value for key, value in dataclasses.asdict(seed).items()
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
