"""Analyse the traces in a run's folder `profile/`, and read and write the file kernels.json."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ftbench.errors import SpecError
from ftbench.profile.analyse import analyse
from ftbench.profile.trace import TraceError, read
from ftbench.profile.work import work_of
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_steps

KERNELS = rundir.KERNELS


def finish(run: RunDir) -> None:
    """Read the trace of each rank, and write kernels.json next to the trace. Do nothing without traces.

    Raises:
        TraceError: If a trace cannot be read. The traces of the other ranks are still processed.
    """
    ranks = [run, *(run.of_rank(int(path.name[4:])) for path in sorted(run.profile.glob("rank[0-9]*")))]
    errors, warnings = list[str](), list[str]()
    for rank in reversed(ranks):  # rank 0 comes last, because its profile includes the warnings of all ranks
        if (rank.profile / rundir.TRACE).is_file():
            try:
                warnings[:0] = _finish(rank, len(ranks), warnings)
            except TraceError as error:
                errors.insert(0, str(error))
    if errors:
        raise TraceError("; ".join(errors))


def _finish(run: RunDir, ranks: int, others: Sequence[str]) -> list[str]:
    """Write kernels.json from the trace of one rank, and return the warnings about this trace."""
    trace = read(run.profile / rundir.TRACE)
    own = [trace.lost if ranks == 1 else f"rank {run.rank or 0}: {trace.lost}"] if trace.lost else []
    document = analyse(trace, work_of(trace), step_before(run)) | {"warnings": [*own, *([] if run.rank else others)]}
    try:
        rundir.write_json(run.profile / KERNELS, document)
    except OSError as error:
        raise rundir.disk_error(run.profile, error) from None
    return own


def step_before(run: RunDir) -> float | None:
    """Return the median time in seconds of the steps just before profiling. Return None if no step was timed."""
    first, last = (rundir.read_json(run.profile / rundir.WINDOW).get("timed") or [0, -1])[:2]
    rows, _ = read_steps(run.steps)
    times = [row.step_time_s for row in rows if row.phase == "train" and first <= (row.step or 0) <= last]
    known = [time for time in times if time is not None]
    return statistics.median(known) if known else None


def load(folder: Path) -> dict[str, Any]:
    """Return the content of kernels.json in `folder`. Raise SpecError if the file is invalid."""
    document = rundir.read_json(folder / KERNELS)
    if document.get("steps", 0) < 1:
        raise SpecError(f"{folder / KERNELS}: not a profile that this version can read: profile again")
    return document
