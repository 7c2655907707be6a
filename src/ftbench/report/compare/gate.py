"""`ftbench report NEW --against OLD --fail-above 5%`: find regressions in speed and memory, for CI."""

from collections.abc import Sequence
from dataclasses import replace

from ftbench.core import units
from ftbench.core.stats import grouped_by
from ftbench.errors import SpecError
from ftbench.report.compare import comparison
from ftbench.report.compare.pairs import Comparison, Pair, noise_of, pair_of
from ftbench.report.compare.words import change
from ftbench.report.data.cells import PEAK, Cell
from ftbench.report.data.collect import Record, state_of
from ftbench.report.data.facts import CARD, LIMIT
from ftbench.report.data.groups import DATA, cells_of, identity, runs_of
from ftbench.report.document import Section
from ftbench.store.rundir import NOT_FINITE

_SIDE = "side"  # the compared key, with the values `earlier` and `new`


def limit_of(text: str) -> float:
    """Convert a share such as `5%`, `5 %` or `0.05` to a number. Raise SpecError for other text."""
    try:
        limit = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < 1:
        raise SpecError(f"--fail-above {text}: write a share below 100 %: 5% or 0.05")
    return limit


def gate(new: Sequence[Record], old: Sequence[Record], limit: float) -> tuple[Section, dict[str, str]]:
    """Compare new and old runs of the same spec and GPU. Return a section, and the regressions as {run ids: reasons}.

    A run regresses if its speed falls by more than `limit` and more than noise. A run also regresses if its peak memory
    rises by more than `limit`, or if the run fails now. With fewer than six steady steps, noise is unknown, so only
    `limit` is used.

    Raises:
        SpecError: the two sides have no spec and GPU in common."""
    now, then = _cells(new, "new"), _cells([record | {"number": None} for record in old], "earlier")
    earlier = grouped_by(then, lambda cell: identity(cell.runs[0]))
    both = []
    for cell in now:
        if same := earlier.get(identity(cell.runs[0])):  # the most similar cell: first by tokens, then by power limit
            likeness = [[each.facts.get(key) == cell.facts.get(key) for key in (DATA, LIMIT, CARD)] for each in same]
            both.append((cell, same[likeness.index(max(likeness))]))
    if not both:
        raise SpecError("--against: the earlier and the new runs have no spec and GPU in common: compare other folders")
    noise = noise_of([*now, *then])
    pairs = tuple(pair_of(_SIDE, cell, before, noise=noise) for cell, before in both)
    regressed = {_ids(pair.cell): "; ".join(reasons) for pair in pairs if (reasons := _regressed(pair, limit))}
    paired = {id(cell): cell for pair in both for cell in pair}
    missing = {"no earlier run": now, "not run again": then}
    section = comparison.section(Comparison(_SIDE, "earlier", tuple(paired.values()), pairs))
    assert section.table is not None
    notes = [f"{_ids(pair.cell)}: {regressed[_ids(pair.cell)]}" for pair in pairs if _ids(pair.cell) in regressed]
    notes += [f"{reason}: {_ids(cell)} ({cell.name} on {cell.facts['gpu']})"
              for reason, cells in missing.items() for cell in cells if id(cell) not in paired]  # fmt: skip
    unknown = sum(not pair.speed and _ids(pair.cell) not in regressed for pair in pairs)
    verdict = f"{len(regressed)} of {len(pairs)} regressed by more than {units.percent(limit)}"
    verdict += f"; the speed of {unknown} was not compared" if unknown else ""
    table = replace(section.table, context={"against earlier runs:": verdict}, notes=[*notes, *section.table.notes])
    return replace(section, key="gate", title="Against earlier runs", table=table), regressed


def _cells(records: Sequence[Record], side: str) -> list[Cell]:
    return [replace(cell, facts={**cell.facts, _SIDE: side}) for cell in cells_of(runs_of(records))]


def _ids(cell: Cell) -> str:
    return " ".join(run.run_id for run in cell.runs)


def _regressed(pair: Pair, limit: float) -> list[str]:
    cell, before = pair.cell, pair.baseline
    assert before is not None
    failed = [state_of(run.record) for run in cell.runs
              if run.record["state"] == NOT_FINITE or (not run.ok and len(before.ok) == len(before.runs))]  # fmt: skip
    if not cell.ok and (before.ok or failed):
        return [f"succeeded before, now {cell.state}" if before.ok else cell.state]
    reasons = failed[:1]
    if pair.speed and pair.speed.value < 1 - limit and (pair.speed.high is None or pair.speed.high < 1):
        unsure = "" if pair.speed.high is not None else ", the noise is unknown"
        reasons.append(f"slower: {change(pair.speed).removesuffix(' ?')}{unsure}")
    if pair.memory and pair.memory.value > 1 + limit:
        reasons.append(f"more memory: {' → '.join(units.gibibytes(side.figure(PEAK)) for side in (before, cell))} GiB")
    return reasons
