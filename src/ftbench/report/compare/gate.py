"""`ftbench report NEW --against OLD --fail-above 5%`: find regressions in speed and memory, for CI."""

from collections.abc import Sequence
from dataclasses import dataclass

from ftbench.core import units
from ftbench.core.stats import grouped_by
from ftbench.errors import SpecError
from ftbench.report.compare.pairs import Pair, noise_of, pair_of
from ftbench.report.compare.words import change, flat_learning, flat_ratio, learning_text
from ftbench.report.data.cells import PEAK, SAMPLES, TOKENS, Cell, number_of
from ftbench.report.data.collect import Record
from ftbench.report.data.facts import CARD, LIMIT
from ftbench.report.data.groups import DATA, cells_of, identity, runs_of
from ftbench.report.data.names import cell_names
from ftbench.report.document import Section, Table

_MOST_CHANGES = 12  # in a note


@dataclass(frozen=True, slots=True)
class GateRow:
    """A pair of the old cell (`pair.baseline`) and the new cell (`pair.cell`), with the regressions as sentences."""

    pair: Pair
    regressed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gate:
    """The result: paired rows, and the cells that only one side has."""

    rows: tuple[GateRow, ...]
    only_new: tuple[Cell, ...]
    only_old: tuple[Cell, ...]
    limit: float

    @property
    def regressed(self) -> list[GateRow]:
        return [row for row in self.rows if row.regressed]


def limit_of(text: str) -> float:
    """Return 0.05 for `5%`, `5 %` or `0.05`. Raise SpecError for anything else."""
    number, percent = text.strip().removesuffix("%").strip(), text.strip().endswith("%")
    try:
        limit = float(number) / (100 if percent else 1)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < 1:
        raise SpecError(f"--fail-above {text}: write a share below 100 %: 5% or 0.05")
    return limit


def gate(new: Sequence[Record], old: Sequence[Record], limit: float) -> Gate:
    """Pair the cells of both sides by spec and GPU, and find regressions.

    A cell regresses if its rate falls by more than `limit` and by more than the noise, if its peak memory rises by more
    than `limit`, if it does not learn the same, or if it now fails. With fewer than six steady steps the noise is
    unknown, and only the limit counts.

    Raises:
        SpecError: the two sides have no spec and GPU in common.
    """
    now, then = (cells_of(runs_of(records)) for records in (new, old))
    earlier = grouped_by(then, lambda cell: identity(cell.runs[0]))
    both = [(cell, _nearest(cell, same)) for cell in now if (same := earlier.get(identity(cell.runs[0])))]
    if not both:
        raise SpecError("--against: the earlier and the new runs have no spec and GPU in common: compare other folders")
    noise, rows = noise_of([*now, *then]), []
    for cell, before in both:
        pair = pair_of("", cell, before, noise=noise)
        rows.append(GateRow(pair, tuple(_regressed(pair, limit))))
    paired = {id(cell) for pair in both for cell in pair}
    return Gate(
        tuple(rows),
        tuple(cell for cell in now if id(cell) not in paired),
        tuple(cell for cell in then if id(cell) not in paired),
        limit,
    )


def _nearest(cell: Cell, candidates: Sequence[Cell]) -> Cell:
    """Return the candidate with the same tokens, power limit and card, if possible."""
    keys = (DATA, LIMIT, CARD)
    return max(candidates, key=lambda other: [other.facts.get(key) == cell.facts.get(key) for key in keys])


def _regressed(pair: Pair, limit: float) -> list[str]:
    cell, before = pair.cell, pair.baseline
    assert before is not None
    if not cell.ok and (before.ok or (pair.learning and pair.learning.failed)):
        return [f"succeeded before, now {cell.state}" if before.ok else cell.state]
    reasons = []
    if pair.speed and pair.speed.value < 1 - limit and (pair.speed.high is None or pair.speed.high < 1):
        unsure = "" if pair.speed.high is not None else ", the noise is unknown"
        reasons.append(f"slower: {change(pair.speed).removesuffix(' ?')}{unsure}")
    if pair.learning and pair.learning.failed:
        reasons.append(f"does not learn the same: {pair.learning.reason}")
    if pair.memory and pair.memory.value > 1 + limit:
        gib = [units.gibibytes(side.figure(PEAK)) for side in (before, cell)]
        reasons.append(f"more memory: {gib[0]} → {gib[1]} GiB")
    return reasons


def sections(result: Gate) -> list[Section]:
    """Return a row per pair, regressions first, and the unpaired cells as notes."""
    rows = sorted(result.rows, key=lambda row: not row.regressed)
    headings = ["#", "name", "verdict", "speed", "memory", "loss"]
    names = cell_names([row.pair.cell for row in rows])
    lines = [
        [
            number_of(row.pair.cell.runs[0].record), name,
            _verdict(row),
            change(row.pair.speed), change(row.pair.memory).removesuffix(" ?"), learning_text(row.pair.learning),
        ]
        for row, name in zip(rows, names, strict=True)
    ]  # fmt: skip
    count = len(result.regressed)
    verdict = f"{count} of {len(rows)} regressed by more than {units.percent(result.limit)}"
    table = Table({"against earlier runs:": verdict}, headings, lines, _notes(result), tuple(headings[1:]))
    return [Section("gate", "Against earlier runs", table, records=[_record(row) for row in rows])]


def _verdict(row: GateRow) -> str:
    cell, reason = row.pair.cell, row.pair.reason
    judged = "ok" if cell.valid or not cell.ok else "not judged"
    verdict = "; ".join(row.regressed) or (judged if cell.ok else f"as before: {cell.state}")
    return f"{verdict}; {reason}" if reason and cell.ok else verdict


def _notes(result: Gate) -> list[str]:
    notes = [f"no earlier run: {_cell_text(cell)}" for cell in result.only_new]
    notes += [f"not run again: {_cell_text(cell)}" for cell in result.only_old]
    changed = dict.fromkeys(str(fact) for row in result.rows for fact in row.pair.differences)
    if changed:
        more = f"; {len(changed) - _MOST_CHANGES} more" if len(changed) > _MOST_CHANGES else ""
        notes.append("changes since then: " + "; ".join(list(changed)[:_MOST_CHANGES]) + more)
    return notes


def _cell_text(cell: Cell) -> str:
    return f"{cell.runs[0].run_id} ({cell.name} on {cell.facts['gpu']})"


def _record(row: GateRow) -> dict[str, object]:
    pair, before = row.pair, row.pair.baseline
    assert before is not None
    figures = {"tokens_per_s": TOKENS, "samples_per_s": SAMPLES, "peak_gb": PEAK}
    return {
        "run_ids": " ".join(run.run_id for run in pair.cell.runs), "cell": pair.cell.name,
        "gpu": pair.cell.facts["gpu"], "model": pair.cell.facts.get("model.id"), "state": pair.cell.state,
        **{name: pair.cell.figure(source) for name, source in figures.items()},
        **{f"{name}_before": before.figure(source) for name, source in figures.items()},
        **flat_ratio("speed", pair.speed), **flat_ratio("memory", pair.memory), **flat_learning(pair.learning),
        "regressed": bool(row.regressed), "why": "; ".join(row.regressed) or None,
    }  # fmt: skip
