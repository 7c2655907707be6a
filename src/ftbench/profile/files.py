"""Analyse the traces in a run's folder `profile/`, and write the file kernels.json."""

import statistics

from ftbench.profile.analyse import analyse
from ftbench.profile.trace import TraceError, read
from ftbench.profile.work import work_of
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_steps


def finish(run: RunDir) -> None:
    """Read the trace of each rank, and write kernels.json next to the trace. Do nothing without traces.

    Raises:
        TraceError: If a trace cannot be read. The traces of the other ranks are still processed.
    """
    ranks = [run, *(run.of_rank(int(path.name[4:])) for path in sorted(run.profile.glob("rank[0-9]*")))]
    errors = []
    for rank in ranks:
        if (rank.profile / rundir.TRACE).is_file():
            try:
                trace = read(rank.profile / rundir.TRACE)
                with rundir.writing(rank.profile):
                    rundir.write_json(rank.profile / rundir.KERNELS, analyse(trace, work_of(trace), step_before(rank)))
            except TraceError as error:
                errors.append(str(error))
    if errors:
        raise TraceError("; ".join(errors))


def step_before(run: RunDir) -> float | None:
    """Return the median time in seconds of the steps just before profiling. Return None if no step was timed."""
    first, last = (rundir.read_json(run.profile / rundir.WINDOW).get("timed") or [0, -1])[:2]
    rows, _ = read_steps(run.steps)
    times = [row.step_time_s for row in rows if row.phase == "train" and first <= (row.step or 0) <= last]
    known = [time for time in times if time is not None]
    return statistics.median(known) if known else None
