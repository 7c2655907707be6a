"""Run directories → one frame, a row a run."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbench.core.rows import FIELDS, SCHEMA
from ftbench.errors import SpecError
from ftbench.spec.methods import METHODS
from ftbench.store.rundir import RunDir, find_runs, read_json, read_state
from ftbench.store.summary import as_dict, summarise

if TYPE_CHECKING:
    import pandas as pd


def collect(paths: Sequence[Path]) -> pd.DataFrame:
    """All runs at or below `paths`, each field of their summaries a column, nested ones dotted (`memory_gb.host_peak`).
    Raises SpecError for a path that does not exist or holds no run."""
    frame = frame_of(summary_of(run) | {"path": str(run.path)} for run in _runs(paths))
    rank = {name: place for place, name in enumerate(METHODS)}
    frame["_method"] = [rank.get(name, len(rank)) for name in frame["method"]]
    order = ["name", "model", "gpu", "_method", "batch_size", "run_id"]
    return frame.sort_values(order, na_position="first", kind="stable").drop(columns="_method").reset_index(drop=True)


def frame_of(summaries: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Summaries as they are in summary.json → a row each, in their order, nested fields dotted."""
    import pandas as pd

    return pd.DataFrame.from_records([_flat(values) for values in summaries])


def _runs(paths: Sequence[Path]) -> list[RunDir]:
    found: dict[Path, RunDir] = {}
    for path in paths:
        if not path.exists():
            raise SpecError(f"{path}: no such file or directory")
        runs = find_runs(_unpacked(path) if path.is_file() else path)
        if not runs:
            raise SpecError(f"{path}: holds no run (a run is a directory with a state.json; `ftbench run` makes one)")
        found |= {run.path.resolve(): run for run in runs}
    times_named = Counter(run.run_id for run in found.values())
    once: dict[Any, RunDir] = {}
    for run in found.values():  # to read every run's steps would take longer than the report
        once.setdefault(_content(run) if times_named[run.run_id] > 1 else run.run_id, run)
    return list(once.values())


def _content(run: RunDir) -> Any:
    """What makes a copy of a run the same run: given twice, in a folder and in a bundle, it is no second repeat."""
    try:
        steps = hashlib.sha256(run.steps.read_bytes()).digest()
    except OSError:
        return run.path.resolve()
    return run.run_id, steps, read_json(run.state).get("ended_at")


def _unpacked(path: Path) -> Path:
    from ftbench.store.bundle import unpack

    return unpack.opened(path)


def as_asked(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the paths that people know: a run out of a bundle lies in a copy that is gone in a moment."""
    unpack = sys.modules.get("ftbench.store.bundle.unpack")
    if "path" not in frame or unpack is None:  # no bundle was opened
        return frame
    return frame.assign(path=[unpack.shown(str(path)) for path in frame["path"]])


def summary_of(run: RunDir, state: str | None = None) -> dict[str, Any]:
    """The summary that the run's own ftbench wrote; computed from its steps where there is none (a killed parent) or
    where it is of another schema. `state` is the run's, where it is known."""
    written = read_json(run.summary)
    state = state or read_state(run)["state"]
    if written.get("schema") == SCHEMA and written.keys() >= FIELDS and written["state"] == state:
        return written
    return as_dict(summarise(run))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and key != "histogram":
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def varying(frame: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    """Of `columns`, those in which the rows differ; what all rows share belongs into a heading."""
    return [name for name in columns if name in frame and frame[name].nunique(dropna=False) > 1]
