"""The curves of runs: a few columns of steps.csv, thinned, packed as little-endian arrays for a page."""

from __future__ import annotations

import base64
import csv
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftbench.report.thin import thin
from ftbench.rundir import RunDir

SERIES = {
    "allocated": "memory_allocated_gb",
    "reserved": "memory_reserved_gb",
    "peak": "peak_memory_gb",
    "step": "step_time_s",
    "loss": "loss",
    "elapsed": "elapsed_time_sec",
}
_PLACE = ("step", "progress_ratio")
_POINT_BYTES = 8  # a step of two bytes and a value of four, in base64
_FEWEST, _MOST = 16, 2000


def points_for(runs: int, budget: int) -> int:
    """How many points each curve of each run may have so that all of them fit into `budget` bytes."""
    return max(_FEWEST, min(_MOST, budget // max(1, runs * len(SERIES) * _POINT_BYTES)))


def curves(path: Path, points: int) -> dict[str, Any]:
    """The training curves of a run: `{steps, planned, wide, <series>: [steps, values]}`, steps as uint16 (uint32
    where `wide`) and values as float32 in base64, a series that no step fills left out; empty for a run without steps. `planned` is how many steps the run was to have.
    An unfinished last line, a line that cannot be read and an evaluation are no points."""
    columns = read_columns(RunDir(path).steps, (*_PLACE, *SERIES.values()))
    steps = columns.get("step", [])
    if not steps:
        return {}
    wide = max(steps) > 0xFFFF
    found: dict[str, Any] = {
        "steps": len(steps), "planned": _planned(steps, columns["progress_ratio"]), "wide": wide,
    }  # fmt: skip
    for name, column in SERIES.items():
        values = columns[column]
        if any(map(math.isfinite, values)):
            places = thin(values, points)
            found[name] = [_pack("I" if wide else "H", [int(steps[i]) for i in places]), _pack("f", [values[i] for i in places])]
    return found


def _planned(steps: Sequence[float], progress: Sequence[float]) -> int | None:
    step, share = steps[-1], progress[-1]
    return round(step / share) if math.isfinite(share) and share > 0 else None


def _pack(kind: str, values: Sequence[float]) -> str:
    if kind == "f":
        values = [value if abs(value) < 3e38 else math.nan for value in values]
    return base64.b64encode(struct.pack(f"<{len(values)}{kind}", *values)).decode()


def read_columns(path: Path, names: Sequence[str]) -> dict[str, list[float]]:
    """Columns of the training rows of a steps.csv as numbers, NaN where a field is empty or the column absent. Empty
    for a file that is absent or holds no such row."""
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError:
        return {}
    head, *lines = text.split("\n")
    lines = lines[:-1]  # what follows the last newline is not finished
    records = csv.reader(lines) if '"' in text else (line.split(",") for line in lines)
    header = head.rstrip("\r").split(",")
    places = [header.index(name) if name in header else None for name in names]
    phase = header.index("phase") if "phase" in header else None
    rank = header.index("rank") if "rank" in header else None
    first_rank: str | None = None
    found: list[list[float]] = []
    for record in records:
        if len(record) != len(header) or (phase is not None and record[phase] != "train"):
            continue
        if rank is not None:
            first_rank = record[rank] if first_rank is None else first_rank
            if record[rank] != first_rank:
                continue
        try:
            found.append([math.nan if i is None or not record[i] else float(record[i]) for i in places])
        except ValueError:
            continue
    found = [row for row in found if names[0] != "step" or 0 < row[0] < 2**32]
    return dict(zip(names, map(list, zip(*found, strict=True)), strict=True)) if found else {}
