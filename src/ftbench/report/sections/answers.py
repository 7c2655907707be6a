"""Answers as sections: samples per night, and the largest batch. A section without data is omitted."""

from collections.abc import Sequence

from ftbench.core import units
from ftbench.report.data.axes import in_order
from ftbench.report.data.cells import PEAK, SAMPLES, TOKENS, Cell, Run
from ftbench.report.data.collect import figure
from ftbench.report.document import Section, table_of
from ftbench.report.sections.rows import field, named_rows, names_of, section

_BEFORE = ("import", "prepare_data", "load", "setup")  # the phases before the first step of every run


def answers(cells: Sequence[Cell], hours: float) -> list[Section]:
    """Return all available answers."""
    parts = [night(cells, hours), frontier(cells)]
    return [part for part in parts if part is not None]


# --- a night ---------------------------------------------------------------------------------------------------------


def night(cells: Sequence[Cell], hours: float = 8.0) -> Section | None:
    """Return samples per hour at steady speed, and samples in `hours` from the start of the process.

    The time before the first step and until the speed is steady counts, but not the samples trained in it. Samples are
    real tokens divided by the mean sample length.
    """
    records = []
    for cell in cells:
        if (rate := cell.figure(SAMPLES)) is None:
            continue
        start, tokens = max((_start_s(run) for run in cell.valid), default=0.0), cell.figure(TOKENS)
        left = max(0.0, hours * 3600 - start)
        records.append({
            **names_of(cell), "samples_per_hour": rate * 3600, "start_s": start, "hours": hours,
            "samples": rate * left, "real_tokens": None if tokens is None else tokens * left,
        })  # fmt: skip
    columns = {
        "samples/h": field("samples_per_hour", units.rate), "start": field("start_s", units.seconds),
        f"samples in {hours:g} h": field("samples", units.count),
        f"tokens in {hours:g} h": field("real_tokens", _millions),
    }  # fmt: skip
    words = ("Samples are real tokens divided by the mean length of the data.",)
    return section("night", f"Samples per hour and in {hours:g} hours", records, columns, words)


def _start_s(run: Run) -> float:
    names = [f"phases_s.{name}" for name in _BEFORE]
    return sum(figure(run.record, name) or 0.0 for name in (*names, "time_to_steady_s"))


def _millions(tokens: float | None) -> str:
    return "" if tokens is None else f"{tokens / 1e6:,.1f} M"


# --- which batch fits ------------------------------------------------------------------------------------------------


def frontier(cells: Sequence[Cell]) -> Section | None:
    """Return a table of recipe and GPU against batch: the peak in GiB if it fits, or the state such as `oom`.

    Returns None for a single batch that fits.
    """
    lines: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in cells:
        model, _, data = cell.workload
        lines.setdefault((model, cell.facts["gpu"], data, cell.way), {})[cell.batch] = cell
    batches = in_order(batch for line in lines.values() for batch in line)
    if len(batches) < 2 and all(cell.ok for cell in cells):
        return None
    ways = [dict(zip(("model", "gpu", "data", "name"), names, strict=True)) for names in lines]
    context, names, others = named_rows(ways)
    fitting = [[batch for batch in batches if batch in line and line[batch].ok] for line in lines.values()]
    columns = names | {"fits": [fits[-1] if fits else "none" for fits in fitting]}
    columns |= {batch: [_spot(line.get(batch)) for line in lines.values()] for batch in batches} | others
    records = [names_of(line[batch]) | {"state": line[batch].state, "peak_gb": line[batch].figure(PEAK)}
               for line in lines.values() for batch in batches if batch in line]  # fmt: skip
    words = ("Columns are batch sizes. A number is the peak of the tensors in GiB.",)
    return Section("frontier", "Which batch fits", table_of(columns, context=context), words, records)


def _spot(cell: Cell | None) -> str:
    if cell is None:
        return ""
    peaks = cell.values(PEAK)
    failed = dict.fromkeys(str(run.record["state"]) for run in cell.runs if not run.ok)
    return " / ".join([*([units.gibibytes(max(peaks))] if peaks else ["fits"] if cell.ok else []), *failed])
