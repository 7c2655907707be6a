"""The table that is finished in the morning: summary.md and summary.csv of what has ended so far."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbench.core import units
from ftbench.core.rows import RunSummary
from ftbench.report.data.collect import frame_of, summary_of
from ftbench.report.render import formats
from ftbench.report.render.tables import Table
from ftbench.store import rundir
from ftbench.store.summary import optimizations_on
from ftbench.sweep.jobs import Job, Standing, short
from ftbench.sweep.plan.grid import Plan
from ftbench.sweep.plan.search import Search

if TYPE_CHECKING:
    import pandas as pd

REPEAT = "repeat"
TERMINAL_ROWS = 500  # more are named, not shown


class Tables:
    """The tables of a plan. A finished run's summary is read once."""

    def __init__(self, folder: Path, plan: Plan, gpu: str | None, impossible: Sequence[tuple[str, str]]) -> None:
        self._folder, self._plan, self._gpu, self._impossible = folder, plan, gpu, impossible
        self._records: dict[Job, dict[str, Any]] = {}

    def write(self) -> None:
        """Replaces both files. Raises MissingError if the disk does not take them."""
        axes, records = self._axes(), self._rows()
        frame = frame_of(records) if records else None
        rundir.write_text(self._folder / "summary.md", self._markdown(frame, axes))
        if frame is not None:
            rundir.write_text(self._folder / "summary.csv", formats.render(frame, "csv"))

    @property
    def written(self) -> bool:
        return (self._folder / "summary.md").exists()

    def _markdown(self, frame: pd.DataFrame | None, axes: Sequence[str]) -> str:
        parts = [f"# {self._folder.name}\n"]
        if (left := self._left()) > 0:
            parts.append(f"{left} runs are still to come.\n")
        if isinstance(self._plan, Search):
            parts.append("## Largest batch\n\n" + formats.markdown(frontier_table(self._plan)))
        if frame is not None:
            parts.append("## Runs\n\n" + formats.render(frame, "md", axes))
        if others := self._others():
            parts.append(f"{others} further runs lie in this folder: `ftbench report` shows all.\n")
        if self._impossible:
            parts.append("## Cannot work\n\n" + "".join(f"- {what}: {reason}\n" for what, reason in self._impossible))
        return "\n".join(parts)

    def terminal(self) -> str:
        parts = [formats.terminal(frontier_table(self._plan))] if isinstance(self._plan, Search) else []
        ended = sum(found.done for found in self._plan.standings.values())
        if ended > TERMINAL_ROWS:
            parts.append(f"{ended:,} rows are in {self._folder / 'summary.md'} and summary.csv\n")
        elif ended:
            parts.append(formats.render(frame_of(self._rows()), "table", self._axes()))
        return "\n".join(parts)

    def frontier(self) -> list[dict[str, Any]]:
        """What a search has found for each family; empty for a grid."""
        return self._plan.as_dicts() if isinstance(self._plan, Search) else []

    def records(self) -> list[dict[str, Any]]:
        """Each ended or skipped job's summary, with its directory in the sweep's folder."""
        return [{key: value for key, value in record.items() if "." not in key} for record in self._rows()]

    def _others(self) -> int:
        """Runs in the folder that are not this plan's: of another grid, or of the spec as it was before."""
        mine = {job.run.run_id for job in self._plan.standings}
        with os.scandir(self._folder) as entries:
            return sum(entry.is_dir() and entry.name[0] != "." and entry.name not in mine for entry in entries)

    def _left(self) -> int:
        return sum(not found.done for found in self._plan.standings.values())

    def _axes(self) -> list[str]:
        keys = dict.fromkeys(key for job in self._plan.standings for key in job.values)
        repeated = any(job.repeat > 1 for job in self._plan.standings)
        return [*keys, *([REPEAT] if repeated else [])]

    def _rows(self) -> list[dict[str, Any]]:
        found = [(job, state) for job, state in self._plan.standings.items() if state.done]
        if isinstance(self._plan, Search):
            found.sort(key=lambda pair: pair[0].spec.train.batch_size)
        order: dict[str, int] = {}
        for job, _ in found:
            order.setdefault(job.family if isinstance(self._plan, Search) else job.cell, len(order))
        found.sort(key=lambda pair: order[pair[0].family if isinstance(self._plan, Search) else pair[0].cell])
        axes = self._axes()
        return [self._record(job, state, axes) for job, state in found]

    def _record(self, job: Job, found: Standing, axes: Sequence[str]) -> dict[str, Any]:
        if job not in self._records:
            summary = dataclasses.asdict(_skipped(job, found, self._gpu)) if found.state == "skipped" else None
            record = (summary or summary_of(job.run, found.state)) | {"path": job.run.run_id}
            self._records[job] = record | {key: _text(job, key) for key in axes}
        return self._records[job]

    def forget(self, job: Job) -> None:
        """A job that has run again has another summary."""
        self._records.pop(job, None)


def _text(job: Job, key: str) -> str:
    return str(job.repeat) if key == REPEAT else short(job.values.get(key, ""))


def _skipped(job: Job, found: Standing, gpu: str | None) -> RunSummary:
    spec = job.spec
    return RunSummary(
        name=spec.name, run_id=job.run.run_id, state=found.state, reason=found.reason, method=spec.method.name,
        model=spec.model.id, weights=spec.model.weights, gpu=gpu, batch_size=spec.train.batch_size,
        gradient_accumulation_steps=spec.train.gradient_accumulation_steps,
        optimizations=optimizations_on(spec.optimizations.model_dump(mode="json")), steps={},
        dataset={"name": spec.dataset.name},
    )  # fmt: skip


def frontier_table(search: Search) -> Table:
    """A row for each family: the largest batch that fits and the first that does not."""
    keys = dict.fromkeys(key for family in search.families for key in family.values if key != "method")
    headings = [
        *(key.rpartition(".")[2] for key in keys), "method", "largest batch", "tokens/s", "reserved GiB",
        "first that fails", "where it fails", "GiB asked for", "knee", "note",
    ]  # fmt: skip
    rows = []
    for family, _, edge in search.edges():
        largest, failing = edge.largest, edge.first_failing
        oom = failing.oom if failing else None
        asked = (oom or {}).get("bytes_requested")
        rows.append([
            *(short(family.values.get(key, "")) for key in keys),
            family.spec.method.name,
            str(largest.batch) if largest else "none" if failing else "",
            units.rate(largest.speed) if largest else "",
            units.gibibytes(largest.peak_gb) if largest else "",
            str(failing.batch) if failing else "",
            f"{oom['phase']}, step {oom['step']}" if oom and oom.get("phase") else "",
            units.gibibytes(units.gib(asked)) if asked else "",
            str(edge.knee or ""),
            edge.note,
        ])  # fmt: skip
    note = (
        "knee: the batch after which no larger one is 5 % faster. A trial begins with the longest samples of the data "
        "set, so that the peak shows in step 1; reserved GiB is the allocator's pool."
    )
    return Table({}, headings, rows, [note])
