"""The curves of runs: a few columns of steps.csv, thinned, packed as little-endian arrays for a page."""

from __future__ import annotations

import base64
import csv
import gc
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftbench.report.data.downsample import thin
from ftbench.store.rundir import RunDir

SERIES = {
    "allocated": "memory_allocated_gb",
    "reserved": "memory_reserved_gb",
    "peak": "peak_memory_gb",
    "step": "step_time_s",
    "loss": "loss",
    "elapsed": "elapsed_time_sec",
}
_POINT_BYTES = 8  # a step of two bytes and a value of four, in base64
_FEWEST, _MOST = 16, 2000


def points_for(runs: int, budget: int) -> int:
    """How many points each curve of each run may have so that all of them fit into `budget` bytes."""
    return max(_FEWEST, min(_MOST, budget // max(1, runs * len(SERIES) * _POINT_BYTES)))


def curves_of(paths: Sequence[Path | None], points: int) -> dict[int, dict[str, Any]]:
    """The curves of each path that has some, by its place."""
    # A million short-lived lists without a cycle among them: looking for one takes a third of the time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        found = ((place, curves(path, points)) for place, path in enumerate(paths) if path is not None)
        return {place: curve for place, curve in found if curve}
    finally:
        if enabled:
            gc.enable()


def curves(path: Path, points: int) -> dict[str, Any]:
    """The training curves of a run: `{steps, planned, wide, <series>: [steps, values]}`, steps as uint16 (uint32 where
    `wide`) and values as float32 in base64; a series that no step fills is left out. Empty for a run without steps.
    `planned` is how many steps the run was to have. An unfinished last line, a line that cannot be read and an
    evaluation are no points."""
    columns = read_columns(RunDir(path).steps, ("step", *SERIES.values()), ("progress_ratio",))
    steps = columns.get("step")
    if not steps:
        return {}
    wide = max(steps) > 0xFFFF
    found: dict[str, Any] = {
        "steps": len(steps), "planned": _planned(steps[-1], columns["progress_ratio"][-1]), "wide": wide,
    }  # fmt: skip
    for name, column in SERIES.items():
        values = columns[column]
        if any(map(math.isfinite, values)):
            places = thin(values, points)
            found[name] = [
                _pack("I" if wide else "H", [int(steps[i]) for i in places]),
                _pack("f", [values[i] for i in places]),
            ]
    return found


def _planned(step: float, share: float) -> int | None:
    return round(step / share) if math.isfinite(share) and share > 0 else None


def _pack(kind: str, values: Sequence[float]) -> str:
    if kind == "f":
        values = [value if abs(value) < 3e38 else math.nan for value in values]
    return base64.b64encode(struct.pack(f"<{len(values)}{kind}", *values)).decode()


def read_columns(path: Path, names: Sequence[str], ends: Sequence[str] = ()) -> dict[str, list[float]]:
    """Columns of the training rows of a steps.csv as numbers, NaN where a field is empty or the column absent; of the
    columns `ends` the last row's alone. Empty for a file that is absent or holds no such row."""
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError:
        return {}
    head, _, rest = text.partition("\n")
    header = head.rstrip("\r").split(",")
    whole = rest[: rest.rfind("\n") + 1]  # what follows the last newline is not finished
    fields = _plain_fields(header, whole) or _checked_fields(header, whole.split("\n")[:-1])
    if not fields:
        return {}
    missing = [math.nan] * len(next(iter(fields.values())))
    found = {name: _numbers(fields[name]) if name in fields else missing for name in names}
    return found | {name: _numbers(fields[name][-1:]) if name in fields else [math.nan] for name in ends}


def _plain_fields(header: Sequence[str], text: str) -> dict[str, Sequence[str]]:
    """The columns of lines that are all whole training steps of one process, cut apart in one go; else empty."""
    if '"' in text:
        return {}
    stride = len(header) + 1
    flat = text.replace("\n", ",\n,").split(",")[:-1]  # each line's fields, then its end
    count = len(flat) // stride
    if not count or flat[len(header) :: stride].count("\n") != count or len(flat) != count * stride:
        return {}
    fields: dict[str, Sequence[str]] = {name: flat[place::stride] for place, name in enumerate(header)}
    same = all(fields[name].count(fields[name][0]) == count for name in ("phase", "rank") if name in fields)
    plain = same and fields.get("phase", ["train"])[0] == "train" and _counted(fields.get("step", ["1"]))
    return fields if plain else {}


def _checked_fields(header: Sequence[str], lines: Sequence[str]) -> dict[str, Sequence[str]]:
    """The same line by line: what cannot be read, is no training step or has no step number is left out; of several
    processes the first speaks."""
    records = [record for line in lines if len(record := _record(line)) == len(header)]
    for name, wanted in (("phase", "train"), ("rank", None)):
        if records and name in header:
            place = header.index(name)
            value = wanted or records[0][place]
            records = [record for record in records if record[place] == value]
    if "step" in header:
        place = header.index("step")
        records = [record for record in records if _counted([record[place]])]
    return dict(zip(header, zip(*records, strict=True), strict=True)) if records else {}


def _record(line: str) -> list[str]:
    """One line's fields: a stray quote spoils no other line."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _counted(steps: Sequence[str]) -> bool:
    return all(0 < step < 2**32 for step in _numbers(steps))


def _numbers(texts: Sequence[str]) -> list[float]:
    try:
        return list(map(float, texts))
    except ValueError:
        return [_number(text) for text in texts]


def _number(text: str) -> float:
    """A field's number; empty or unreadable is not a number, and a gap in the curve."""
    try:
        return float(text)
    except ValueError:
        return math.nan
