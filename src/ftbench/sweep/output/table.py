"""The tables of a sweep: summary.md and summary.csv of all finished runs."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from ftbench.core import units
from ftbench.core.redact import without_secrets
from ftbench.core.rows import RunSummary
from ftbench.core.table import printable
from ftbench.report import formats, select
from ftbench.report.data import groups
from ftbench.report.data.collect import collect, records
from ftbench.report.document import Report, Table
from ftbench.store import rundir
from ftbench.store.summary import optimizations_on, read_summary
from ftbench.sweep.plan.base import Job, Plan, Standing, short
from ftbench.sweep.plan.search import Search

BOARD = "sweep.json"  # status of all jobs
REPEAT = "repeat"
TERMINAL_ROWS = 500  # more rows are only in the files


class Tables:
    """The tables of a plan."""

    def __init__(self, plan: Plan, impossible: Sequence[tuple[str, str]]) -> None:
        self.folder, self.plan, self._impossible = plan.options.folder, plan, impossible
        self._records: dict[Job, dict[str, Any]] = {}

    def write(self) -> None:
        """Write both files. Raise MissingError if the disk is full."""
        report = Report(records(self._rows()), self._axes())
        self._put("summary.md", self._markdown(report))
        if report.records:
            self._put("summary.csv", formats.render(report, "csv"))

    def _put(self, name: str, text: str) -> None:
        """Write a file without secrets and control characters."""
        rundir.write_text(self.folder / name, printable(without_secrets(text)))

    def _markdown(self, report: Report) -> str:
        parts = [f"# {self.folder.name}\n"]
        if left := self.plan.left():
            parts.append(f"{units.some(left, 'run')} still to come.\n")
        if isinstance(self.plan, Search):
            parts.append("## Largest batch\n\n" + formats.markdown(frontier_table(self.plan)))
        if report.records:
            parts.append("## Runs\n\n" + formats.render(report, "md"))
        if others := self._others():
            parts.append(f"{units.some(others, 'other run')} in this folder: `ftbench report` shows all.\n")
        if self._impossible:
            parts.append("## Impossible\n\n" + "".join(f"- {what}: {reason}\n" for what, reason in self._impossible))
        return "\n".join(parts)

    def terminal(self) -> str:
        """Return the tables for the terminal."""
        parts = [formats.terminal(frontier_table(self.plan))] if isinstance(self.plan, Search) else []
        ended = sum(standing.done for standing in self.plan.standings.values())
        if ended > TERMINAL_ROWS:
            parts.append(f"{ended:,} rows are in {self.folder / 'summary.md'} and summary.csv\n")
        elif ended:
            parts.append(formats.render(self._ranked(), "table"))
        return "\n".join(parts)

    def _ranked(self) -> Report:
        """Return the finished runs with merged repeats, the fastest first, and cells that were skipped.

        The numbers are the same as in `ftbench report` of the folder.
        """
        jobs = {job.run.run_id: job for job, standing in self.plan.standings.items() if standing.done}
        rows = [record for record in self._rows() if record["state"] == "skipped"]
        ran = [run for run in collect([self.folder]) if run["run_id"] in jobs] if len(jobs) > len(rows) else []
        cells = {jobs[run["run_id"]].cell for run in ran}
        skipped = {jobs[row["run_id"]].cell: row | {"path": str(self.folder / row["path"])} for row in reversed(rows)}
        left_out = records(row for cell, row in skipped.items() if cell not in cells)
        named, axes = groups.with_axes(groups.merge_repeats([*ran, *left_out]))
        return Report(select.arranged(named, "tokens/s"), axes)

    def document(self) -> dict[str, Any]:
        """Return the document for `--json`. `frontier` is empty for a grid."""
        frontier = self.plan.as_dicts() if isinstance(self.plan, Search) else []
        return {"folder": str(self.folder), "frontier": frontier, "runs": self.records()}

    def records(self) -> list[dict[str, Any]]:
        """Return the summary of each finished or skipped job, with its directory in the sweep's folder."""
        return [{key: value for key, value in record.items() if "." not in key} for record in self._rows()]

    def _others(self) -> int:
        """Return the number of runs in the folder that do not belong to this plan."""
        planned = {job.run.run_id for job in self.plan.standings}
        with os.scandir(self.folder) as entries:
            return sum(entry.is_dir() and entry.name[0] != "." and entry.name not in planned for entry in entries)

    def _axes(self) -> list[str]:
        keys = dict.fromkeys(key for job in self.plan.standings for key in job.values)
        repeated = any(job.repeat > 1 for job in self.plan.standings)
        return [*keys, *([REPEAT] if repeated else [])]

    def _rows(self) -> list[dict[str, Any]]:
        """Return a record for each finished job, grouped by cell (in a search: by family)."""
        searching = isinstance(self.plan, Search)
        jobs = [job for job, standing in self.plan.standings.items() if standing.done]
        if searching:
            jobs.sort(key=lambda job: job.spec.train.batch_size)
        order: dict[str, int] = {}
        for job in jobs:
            order.setdefault(job.family if searching else job.cell, len(order))
        jobs.sort(key=lambda job: order[job.family if searching else job.cell])
        axes = self._axes()
        return [self._record(job, self.plan.standings[job], axes) for job in jobs]

    def _record(self, job: Job, standing: Standing, axes: Sequence[str]) -> dict[str, Any]:
        if job not in self._records:
            if standing.state == "skipped":
                record = dataclasses.asdict(_skipped(job, standing, self.plan.options.gpu))
            else:
                record = read_summary(job.run, standing.state)
            self._records[job] = record | {"path": job.run.run_id} | {key: _text(job, key) for key in axes}
        return self._records[job]

    def exit_code(self, code: int) -> int:
        """Return the command's exit code; `code` is that of the session."""
        return code

    def forget(self, job: Job) -> None:
        """Discard the summary of a job that has run again."""
        self._records.pop(job, None)


def _text(job: Job, key: str) -> str:
    return str(job.repeat) if key == REPEAT else short(job.values.get(key, ""))


def _skipped(job: Job, standing: Standing, gpu: str | None) -> RunSummary:
    spec = job.spec
    return RunSummary(
        name=spec.name, run_id=job.run.run_id, state=standing.state, reason=standing.reason, method=spec.method.name,
        model=spec.model.id, weights=spec.model.weights, gpu=gpu, batch_size=spec.train.batch_size,
        gradient_accumulation_steps=spec.train.gradient_accumulation_steps,
        optimizations=optimizations_on(spec.optimizations.model_dump(mode="json")), steps={},
        dataset={"name": spec.dataset.name},
    )  # fmt: skip


def frontier_table(search: Search) -> Table:
    """Return a row per family: the largest batch that fits and the first that does not."""
    keys = dict.fromkeys(key for family in search.families for key in family.values if key != "method")
    headings = [
        *(key.rpartition(".")[2] for key in keys), "method", "largest batch", "tokens/s", "reserved GiB",
        "first that fails", "where it fails", "GiB asked for", "knee", "note",
    ]  # fmt: skip
    rows = []
    for family, _, edge in search.edges():
        largest, failing = edge.largest, edge.first_failing
        oom = failing.oom if failing else None
        requested = (oom or {}).get("bytes_requested")
        rows.append([
            *(short(family.values.get(key, "")) for key in keys),
            family.spec.method.name,
            str(largest.batch) if largest else "none" if failing else "",
            units.rate(largest.speed) if largest else "",
            units.gibibytes(largest.peak_gb) if largest else "",
            str(failing.batch) if failing else "",
            f"{oom['phase']}, step {oom['step']}" if oom and oom.get("phase") else "",
            units.gibibytes(units.gib(requested)) if requested else "",
            str(edge.knee or ""),
            edge.note,
        ])  # fmt: skip
    note = (
        "knee: no larger batch is 5 % faster. A trial starts with the longest samples of the data set, so step 1 shows "
        "the peak. Reserved GiB is the allocator's pool."
    )
    return Table({}, headings, rows, [note])
