"""The questions of the founding study as sections: samples per night, memory over time, largest batch, trained
parameters, and generated answers. A section without data is omitted."""

from collections.abc import Callable, Sequence

from ftbench.core import units
from ftbench.core.stats import quantile
from ftbench.report.data.axes import in_order
from ftbench.report.data.cells import PEAK, SAMPLES, TOKENS, Cell, Run
from ftbench.report.data.collect import figure
from ftbench.report.document import Section, table_of
from ftbench.report.sections.cost import NIGHT_H
from ftbench.report.sections.rows import Record, field, first_of, named_rows, names_of, section
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_columns

_BEFORE = ("import", "prepare_data", "load", "setup")  # the phases before the first step of every run


def answers(cells: Sequence[Cell], hours: float = NIGHT_H, *, curves: bool = True) -> list[Section]:
    """Return all available answers. `curves` includes memory and time over progress, which reads every step."""
    over_progress = memory(cells) if curves else None
    parts = [night(cells, hours), frontier(cells), over_progress, trained(cells)]
    return [part for part in parts if part is not None]


# --- a night ---------------------------------------------------------------------------------------------------------


def night(cells: Sequence[Cell], hours: float = NIGHT_H) -> Section | None:
    """Return samples per hour at steady speed, and samples in `hours` from the start of the process.

    The time before the first step and until the speed is steady counts, but not the samples trained in it. Samples are
    real tokens divided by the mean sample length.
    """
    records = []
    for cell in cells:
        if (rate := cell.figure(SAMPLES)) is None:
            continue
        start, tokens = max((_start_s(run) for run in cell.ok), default=0.0), cell.figure(TOKENS)
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


# --- memory and time over progress -----------------------------------------------------------------------------------


_COLUMNS = ("progress_ratio", "elapsed_time_sec", "memory_allocated_gb", "memory_reserved_gb", "peak_memory_gb")


def memory(cells: Sequence[Cell]) -> Section | None:
    """Return memory and time over progress, for the first successful run of each cell.

    Memory in GiB: allocated and reserved at the median step and at most, and the highest peak. Time in seconds: until
    25 %, 50 % and 100 % of the steps.
    """
    records = [names_of(cell) | part for cell in cells if cell.ok and (part := _over_progress(cell.ok[0]))]
    columns = {name: field(f"{name}_gb", units.gibibytes) for name in ("allocated", "reserved", "peak")}
    shares = {"at 25 %": "25", "at 50 %": "50", "at the end": "100"}
    columns |= {name: field(f"elapsed_{share}_s", units.seconds) for name, share in shares.items()}
    words = ("GiB allocated and reserved at the end of the median step, and the highest peak within a step. Time since "
             "the first step.",)  # fmt: skip
    return section("memory", "Memory and time over progress", records, columns, words)


def _over_progress(run: Run) -> Record | None:
    """Return memory and time of a run over its progress, or None if the progress is unknown."""
    columns = read_columns(run.dir.steps, _COLUMNS)
    rows = [row for row in zip(*columns.values(), strict=True) if row[0] is not None and row[0] == row[0]]
    if not rows:
        return None
    allocated, reserved, peak = ([gib for row in rows if (gib := row[column]) is not None] for column in (2, 3, 4))

    def at(share: float) -> float | None:
        return next((row[1] for row in rows if (row[0] or 0.0) >= share and row[1] is not None), None)

    return {
        "allocated_gb": quantile(allocated, 0.5) if allocated else None,
        "reserved_gb": quantile(reserved, 0.5) if reserved else None,
        "reserved_max_gb": max(reserved, default=None), "peak_gb": max(peak, default=None),
        "elapsed_25_s": at(0.25), "elapsed_50_s": at(0.5), "elapsed_100_s": at(1.0),
    }  # fmt: skip


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


# --- trained parameters ----------------------------------------------------------------------------------------------


def trained(cells: Sequence[Cell]) -> Section | None:
    """Return trainable parameters per module kind, one row per model, method and rank."""
    lines: dict[tuple[str, ...], Record] = {}
    for cell in cells:
        if by_kind := first_of(cell, _by_kind):
            facts = cell.facts
            way = {"model": facts.get("model.id", "").rsplit("/", 1)[-1], "method": facts.get("method.name", ""),
                   "rank": facts.get("method.rank", "")}  # fmt: skip
            lines.setdefault(tuple(way.values()), way | by_kind)
    records = list(lines.values())
    kinds = [kind for kind in dict.fromkeys(key for record in records for key in record) if kind not in _WAY]
    kinds = [kind for kind in kinds if any(record.get(kind) for record in records)]
    columns: dict[str, Callable[[Record], str]] = {name: field(name) for name in _WAY}
    columns |= {kind: _parameters(kind) for kind in kinds} | {"all": _parameters(*kinds)}
    title = "Trained parameters by kind of module"
    return section("trained", title, records if kinds else [], columns, named=False, text=("model",))


_WAY = ("model", "method", "rank")


def _parameters(*kinds: str) -> Callable[[Record], str]:
    def text(record: Record) -> str:
        counts = [record[kind] for kind in kinds if record.get(kind) is not None]
        return units.parameters(sum(counts) if counts else None)

    return text


def _by_kind(run: Run) -> dict[str, int]:
    kinds = read_json(run.dir.applied).get("parameters", {}).get("by_kind", {})
    return {kind: line["trainable"] for kind, line in kinds.items() if line.get("trainable") is not None}
