"""Write the tables of a sweep: summary.md and summary.csv, with all finished runs."""

from collections.abc import Iterator, Sequence
from typing import Any

from ftbench.core import units
from ftbench.core.table import wrapped
from ftbench.report import formats, select
from ftbench.report.data import groups
from ftbench.report.data.collect import Record, collect
from ftbench.report.document import Report, Table, table_of
from ftbench.store.output import write_output
from ftbench.sweep.plan.base import Plan, short
from ftbench.sweep.plan.search import Search

BOARD = "sweep.json"  # status of all jobs


class Tables:
    """The tables of a plan. Subclasses for other commands change the sections and the keys of the JSON document."""

    def __init__(self, plan: Plan, impossible: Sequence[tuple[str, str]]) -> None:
        self.folder, self.plan, self._impossible = plan.options.folder, plan, impossible

    def lines(self) -> Iterator[str]:
        """Yield the lines of text that are printed above the tables."""
        if any(job.spec.launch.mock != "off" for job in self.plan.statuses):
            yield "launch.mock: nothing was trained, and all figures are invented."

    def sections(self, runs: Sequence[Record]) -> Iterator[tuple[str, Table]]:
        """Yield (title, table) of each section."""
        if isinstance(self.plan, Search):
            yield "largest batch", frontier_table(self.plan)

    def answer(self, runs: Sequence[Record]) -> dict[str, Any]:
        """Return what this kind of plan adds to the JSON document, as {key: value}."""
        return {"frontier": self.plan.as_dicts() if isinstance(self.plan, Search) else []}

    def exit_code(self, code: int) -> int:
        """Return the exit code of the command. This class returns `code`, the exit code of the session."""
        return code

    def write(self) -> None:
        """Write summary.md and summary.csv. Raise MissingError if the disk is full."""
        runs = self.runs()
        write_output(self.folder / "summary.md", self._markdown(runs))
        if runs:
            write_output(self.folder / "summary.csv", formats.csv_text(runs))

    def _markdown(self, runs: Sequence[Record]) -> str:
        left = self.plan.left()
        parts = [f"# {self.folder.name}\n"]
        parts += [f"{units.some(left, 'run')} still to come.\n"] if left else []
        parts += ["".join(f"- {line}\n" for line in lines)] if (lines := [*self.lines()]) else []
        parts += [f"## {title.capitalize()}\n\n{formats.markdown(table)}" for title, table in self.sections(runs)]
        parts += ["## Runs\n\n" + formats.render(_report(runs), "md")] if runs else []
        for title, pairs in (("Skipped", self._skipped()), ("Impossible", self._impossible)):
            parts += [f"## {title}\n\n" + "".join(f"- {what}: {reason}\n" for what, reason in pairs)] if pairs else []
        return "\n".join(parts)

    def terminal(self) -> str:
        """Return the text for the terminal: the sections, or a table of all runs if there are no sections."""
        runs = self.runs()
        parts = ["".join(f"{line}\n" for line in lines)] if (lines := [*self.lines()]) else []
        sections = [f"{title.upper()}\n{formats.terminal(table)}" for title, table in self.sections(runs)]
        parts += sections or ([formats.render(_report(runs), "table")] if runs else [])
        others = [*(("skipped", *pair) for pair in self._skipped()), *(("impossible", *p) for p in self._impossible)]
        lines = [wrapped(f"{state:<10}  {what}: {reason}", 12) + "\n" for state, what, reason in others]
        parts += ["".join(lines)] if lines else []
        return "\n".join(parts)

    def document(self) -> dict[str, Any]:
        """Return the document for `--json`. The runs have the fields of `ftbench report --format json`."""
        runs = self.runs()
        skipped = [{"what": what, "reason": reason} for what, reason in self._skipped()]
        answer = self.answer(runs)
        return {"folder": str(self.folder), "left": self.plan.left(), **answer, "skipped": skipped, "runs": runs}

    def runs(self) -> list[Record]:
        """Return the records of the finished runs, with the same numbers as in `ftbench report FOLDER`."""
        done = {job.run.run_id for job, each in self.plan.statuses.items() if each.done and each.state != "skipped"}
        return [record for record in collect([self.folder]) if record["run_id"] in done] if done else []

    def _skipped(self) -> list[tuple[str, str]]:
        return [(job.what, str(each.reason)) for job, each in self.plan.statuses.items() if each.state == "skipped"]


def _report(runs: Sequence[Record]) -> Report:
    """Return a report of the runs, the fastest first. The repeats of a cell are one row."""
    named, axes = groups.with_axes(groups.merge_repeats(groups.runs_of(runs)))
    return Report(select.arranged(named, "tokens/s"), axes)


def frontier_table(search: Search) -> Table:
    """Return the table of `--until-oom`: the largest batch that fits and the smallest that does not, for each cell."""
    keys = dict.fromkeys(key for cell in search.cells for key in cell.values if key != "method")
    rows = []
    for cell, _, result in search.results():
        largest, failing = result.largest, result.first_failing
        oom = (failing.oom if failing else None) or {}
        row: dict[str, Any] = {key.rpartition(".")[2]: short(cell.values.get(key, "")) for key in keys}
        rows.append(row | {
            "method": cell.spec.method.name,
            "largest batch": largest.batch if largest else "none" if failing else "",
            "tokens/s": units.rate(largest.speed) if largest else "",
            "reserved GiB": units.gibibytes(largest.peak_gb) if largest else "",
            "first that fails": failing.batch if failing else "",
            "where it fails": f"{oom['phase']}, step {oom['step']}" if oom.get("phase") else "",
            "GiB asked for": units.gibibytes(size / units.GIB) if (size := oom.get("bytes_requested")) else "",
            "knee": result.knee or "", "note": result.note,
        })  # fmt: skip
    note = (
        "knee: no larger batch is 5 % faster. A trial starts with the longest samples of the data set, so step 1 shows "
        "the peak. Reserved GiB is the allocator's pool."
    )
    return table_of({name: [str(row[name]) for row in rows] for name in rows[0]}, [note])
