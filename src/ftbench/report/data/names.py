"""The name of each row of a table: short, and unlike those of the others."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ftbench.core.hardware import canonical_name
from ftbench.report.data.facts import CPU
from ftbench.report.data.groups import Cell, Run, cells_of


def cell_names(cells: Sequence[Cell]) -> list[str]:
    """Return `lora at batch 4`, with the model before it and the GPU behind it where these vary, and the data where
    nothing else tells two cells apart."""
    rows = [(cell.workload[0].rsplit("/", 1)[-1], cell.name, cell.facts["gpu"], cell.workload[2]) for cell in cells]
    return row_names(rows)


def row_names(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """Return a name for each row of (model, name, GPU, data)."""
    models, gpus = ({row[at] for row in rows} for at in (0, 2))
    names = [
        (f"{model}: " if len(models) > 1 and model else "") + name
        + (f" on {'the CPU' if gpu == CPU else canonical_name(gpu)}" if len(gpus) > 1 else "")
        for model, name, gpu, _ in rows
    ]  # fmt: skip
    times = Counter(dict(zip(rows, names, strict=True)).values())  # several rows may be about the same
    return [f"{name}, {row[3]}" if times[name] > 1 else name for name, row in zip(names, rows, strict=True)]


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return the name of each run: that of its cell, and which of its repeats it is."""
    cells = cells_of(runs)
    names: dict[str, str] = {}
    for cell, name in zip(cells, cell_names(cells), strict=True):
        for run, repeat in zip(cell.runs, _repeats(cell), strict=True):
            names[str(run.record["path"])] = name if len(cell.runs) == 1 else f"{name} ({repeat})"
    return [names[str(run.record["path"])] for run in runs]


def _repeats(cell: Cell) -> list[str]:
    """Return `r2` of `…-r2` for each run where that tells the repeats apart, else `second-gpu/r2` with its folder, else
    the runs' whole ids."""
    ends = [run.run_id.rpartition("-")[2] for run in cell.runs]
    within = [f"{run.dir.path.parent.name}/{end}" for run, end in zip(cell.runs, ends, strict=True)]
    return next((names for names in (ends, within) if len(set(names)) == len(names)), [run.run_id for run in cell.runs])


def run_of(record: Mapping[str, Any]) -> str:
    """Return `#3`, by which `ftbench show` knows a run; its id where it has no number."""
    return f"#{number}" if (number := number_of(record)) else str(record["run_id"])


def number_of(record: Mapping[str, Any]) -> str:
    """Return the number of a run in its report, empty where it has none."""
    return str(record.get("number") or "")
