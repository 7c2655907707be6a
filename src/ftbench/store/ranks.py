"""Merge the steps of several ranks. Tokens and energy are added. For time and memory, the highest value is used.

Each rank writes a separate steps.csv, which avoids communication during a step. The ranks of a tensor-parallel or
expert-parallel group have the same batch (same `data_rank`). This batch counts once.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ftbench.core.rows import StepRow
from ftbench.core.units import listed
from ftbench.store.rundir import RunDir, gpus_of, read_json, write_json
from ftbench.store.steps import StepsWriter, read_steps

TIERS = {"allocated": "peak_memory_gb", "reserved": "peak_reserved_gb", "device": "device_memory_gb"}


def merge(ranks: Sequence[Sequence[StepRow]]) -> list[StepRow]:
    """Merge the steps that all ranks have recorded, and return one row per step in the order of the first rank."""
    tables = [{(row.phase, row.step): row for row in rows} for rows in ranks]
    return [merged([table[key] for table in tables]) for key in tables[0] if all(key in table for table in tables)]


def merged(rows: Sequence[StepRow]) -> StepRow:
    """Merge the rows of one step. If a value is unknown on one rank, the merged value is None."""
    return StepRow(**{column.name: _value(column.name, column.metadata["ranks"], rows) for column in fields(StepRow)})


def _value(name: str, how: str, rows: Sequence[StepRow]) -> Any:
    if how in ("shares", "loss"):
        rows = _rows_per_group(rows)
    if how == "loss" and rows[0].phase == "evaluate":
        rows = [row for row in rows if row.label_tokens != 0] or rows  # skip ranks that only pad the last batch
    values = [getattr(row, name) for row in rows]
    if how in _WITH_UNKNOWN:
        return _WITH_UNKNOWN[how](values)
    if any(value is None for value in values):
        return None
    return _loss(rows) if how == "loss" else _COMBINED[how](values)


def _rows_per_group(rows: Sequence[StepRow]) -> list[StepRow]:
    """Return one row for each data-parallel group: the ranks with the same batch. The loss is the mean over the group.

    With context parallelism, losses differ within a group, because each rank has a part of every sequence.
    """
    members: dict[int | None, list[StepRow]] = {}
    for index, row in enumerate(rows):
        members.setdefault(index if row.data_rank is None else row.data_rank, []).append(row)
    return [replace(group[0], loss=_mean([row.loss for row in group])) for group in members.values()]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _loss(groups: Sequence[StepRow]) -> float:
    """Return the loss of one step. `groups` has one row per data-parallel group. For a training step, the loss is the
    mean over groups. For an evaluation, the loss is the mean over label tokens."""
    labels = [row.label_tokens for row in groups]
    losses = [row.loss or 0.0 for row in groups]
    if groups[0].phase != "evaluate" or not all(labels):
        return sum(losses) / len(losses)
    return sum(loss * (count or 0) for loss, count in zip(losses, labels, strict=True)) / sum(n or 0 for n in labels)


def _all_reasons(throttles: Sequence[str | None]) -> str | None:
    reasons = [reason for text in throttles if text for reason in text.split("|")]
    return ("|".join(dict.fromkeys(r for r in reasons if r != "none")) or "none") if reasons else None


_COMBINED: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum, "shares": sum, "lowest": min, "mean": statistics.fmean,
    "highest": lambda values: next((value for value in values if math.isnan(value)), max(values)),  # or NaN
}  # fmt: skip
_WITH_UNKNOWN: dict[str, Callable[[list[Any]], Any]] = {
    "first": lambda values: values[0], "none": lambda values: None, "all": _all_reasons,
}  # fmt: skip


def spread(ranks: Sequence[Sequence[StepRow]], warmup: int) -> dict[str, Any]:
    """Return the section `ranks` of a summary. The section is empty for a single rank.

    `count` is the number of ranks. `spread` has the lowest and the highest step time and memory of all ranks.
    `memory_gb` has the memory peaks of each rank. `token_skew` is the share of a step spent waiting.
    """
    if len(ranks) < 2:
        return {}
    steps = [[row for row in rows if row.phase == "train"] for rows in ranks]
    times = [[row.step_time_s for row in rows if row.step_time_s is not None] for rows in steps]
    figures: dict[str, list[Any]] = {name: [_peak(rows, name) for rows in ranks] for name in TIERS.values()}
    figures["step_time_s"] = [statistics.median(each[warmup:] or each) if each else None for each in times]
    known = {name: values for name, values in figures.items() if None not in values}
    columns_spread = {name: {"lowest": min(values), "highest": max(values)} for name, values in known.items()}
    memory = [{tier: _peak(rows, name) for tier, name in TIERS.items()} for rows in ranks]
    return {"count": len(ranks), "spread": columns_spread, "memory_gb": memory, "token_skew": token_skew(ranks, warmup)}


def stages(run: RunDir, count: int) -> dict[str, Any]:
    """Return `layers` (of each pipeline stage) and `bubble` of a run with `count` ranks. Return {} without a pipeline.

    A pass is the forward and backward pass of all micro-batches. Its time is the time of the slowest rank, because
    the last stage finishes early. `bubble` is `1 - mean computing time of the ranks / time of the pass`.
    """
    parts = [read_json(run.of_rank(rank).applied).get("parallel", {}) for rank in range(count)]
    if not parts or "split" not in parts[0]:
        return {}
    busy, passes = _mean([part.get("busy_s") for part in parts]), [part.get("pass_s") or 0.0 for part in parts]
    return {"layers": parts[0]["split"], "bubble": None if busy is None else 1 - busy / max(passes)}


def _peak(rows: Sequence[StepRow], name: str) -> float | None:
    return max((value for row in rows if (value := getattr(row, name)) is not None), default=None)


def token_skew(ranks: Sequence[Sequence[StepRow]], warmup: int) -> float | None:
    """Return the share of a steady step in which an average rank waits for the rank with the most padded tokens.

    The time of a rank is assumed to be proportional to its padded tokens. Step times do not show the wait, because all
    ranks end a step together. Return None if a rank does not count tokens.
    """
    tables = [{row.step: row.padded_tokens for row in rows if row.phase == "train"} for rows in ranks]
    steady = sorted(step for step in tables[0] if step is not None)[warmup:]
    counts = [[table.get(step) for table in tables] for step in steady]
    known = [[count or 0 for count in step] for step in counts if None not in step and any(step)]
    if not known or len(known) < len(counts):
        return None
    return 1 - sum(statistics.fmean(step) for step in known) / sum(max(step) for step in known)


def read_ranks(run: RunDir) -> tuple[list[list[StepRow]], list[str]]:
    """Return the rows of each rank, and warnings. There are no rows if a file is missing or the run has one process."""
    if not (files := rank_files(run)):
        return [], []
    count = read_json(run.spec_json).get("launch", {}).get("gpus", 1)
    count = count if count > 1 else len(files)
    files = files[:count]  # ignore files beyond the number of ranks
    if missing := [path.name for path in (run.of_rank(number).steps for number in range(count)) if path not in files]:
        return [], [f"{listed(missing, 1)} of {count} ranks: missing, so there are no figures per rank"]
    tables = [read_steps(path) for path in files]
    notes = [read_json(run.of_rank(number).applied).get("warnings", []) for number in range(count)]
    others = [f"rank {at}: {text}" for at, texts in enumerate(notes) for text in texts if text not in notes[0]]
    return [rows for rows, _ in tables], [text for _, texts in tables for text in texts] + others


def rank_files(run: RunDir) -> list[Path]:
    """Return the existing files steps.rankN.csv in the order of the ranks."""
    return sorted(run.path.glob("steps.rank[0-9]*.csv"), key=lambda path: (len(path.name), path.name))


def write_merged(run: RunDir) -> None:
    """Write the steps.csv of a finished run from the files of its ranks. Raise MissingError if the disk is full."""
    ranks, _ = read_ranks(run)
    _merge_nodes(run)
    if not ranks or run.steps.exists():
        return
    with closing(StepsWriter(run.steps)) as writer:
        writer.append(merge(ranks))


def _merge_nodes(run: RunDir) -> None:
    """Add the GPUs of the files machine.node*.json (other nodes) to machine.json, and delete these files."""
    for path in sorted(run.path.glob("machine.node*.json"), key=lambda path: (len(path.name), path.name)):
        machine = read_json(run.machine)
        write_json(run.machine, machine | {"gpus": [*gpus_of(machine), *gpus_of(read_json(path))]})
        path.unlink()
