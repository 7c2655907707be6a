"""What was predicted beside what was measured (`--estimates`): memory of every run, and the store's own error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftbench.core import units
from ftbench.estimate import calibrate, constants, measured
from ftbench.report.cells import HEADINGS, Run, cells_of, shown, who
from ftbench.report.document import Section
from ftbench.report.tables import Table


def memory(runs: Sequence[Run]) -> Section | None:
    """Each run's memory as `ftbench estimate` would have said it for the batch that it had, with the constants in use;
    None where no run on a GPU says what it took."""
    records: list[dict[str, Any]] = []
    rows: list[calibrate.Row] = []
    stored: list[measured.Measured] = []
    for cell in cells_of(runs):
        for run in cell.runs:
            known = measured.measured(run.dir)
            if known is None:
                continue
            stored.append(known)
            if not known.fits:
                records.append(who(cell) | _ended(known))
            elif found := calibrate.rows([known], constants.constants()):
                rows += found
                records.append(who(cell) | _record(found[0]))
    if not records:
        return None
    tiers = [f"{tier} GiB" for tier in measured.TIERS]
    headings = [*HEADINGS, *tiers, *(f"{tier} estimated" for tier in measured.TIERS), "verdict"]
    table = Table({}, headings, [_texts(record) for record in records], [], (*HEADINGS, "verdict"))
    return Section("estimates", "Memory: estimated and measured", table, _errors(rows, stored), records)


def _record(row: calibrate.Row) -> dict[str, Any]:
    found: dict[str, Any] = {"verdict": row.estimate.verdict, "state": "ok"}
    for tier in measured.TIERS:
        found |= {tier: getattr(row.run, tier), f"{tier}_estimated": getattr(row.estimate, tier).expected}
        found[f"{tier}_error"] = row.errors.get(tier)
    return found


def _ended(run: measured.Measured) -> dict[str, Any]:
    """A run that ran out of memory: its peaks say only what it had when it ended."""
    estimate = run.estimate(constants.constants())
    found: dict[str, Any] = {"verdict": estimate.verdict, "state": "oom"}
    for tier in measured.TIERS:
        found |= {tier: None, f"{tier}_estimated": getattr(estimate, tier).expected, f"{tier}_error": None}
    return found


def _texts(record: dict[str, Any]) -> list[str]:
    real = [units.gibibytes(record[tier]) or ("oom" if record["state"] == "oom" else "") for tier in measured.TIERS]
    said = []
    for tier in measured.TIERS:
        error = record[f"{tier}_error"]
        said.append(units.gibibytes(record[f"{tier}_estimated"]) + (f" ({error:+.1%})" if error is not None else ""))
    return [*shown(record), *real, *said, record["verdict"]]


def _errors(rows: Sequence[calibrate.Row], stored: Sequence[measured.Measured]) -> list[str]:
    errors = {tier: calibrate.error(rows, tier) for tier in measured.TIERS}
    found = [
        f"{tier} {error.mean:.1%} in the mean of {error.count} runs, {error.worst:.1%} at worst"
        for tier, error in errors.items()
        if error is not None
    ]
    wrong = calibrate.false_fits(stored, constants.constants())
    said = f"Said to fit and did not: {', '.join(wrong) or 'none'}."
    return [f"Errors: {'; '.join(found)}. {said}" if found else said]
