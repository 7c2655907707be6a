"""Write profile/kernels.json from the traces of a run: kernels by group, phases, idle time, communication."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ftbench.core.units import some
from ftbench.profile.trace import GLOO, LAUNCH, Trace, TraceError, read
from ftbench.profile.work import COMMUNICATION, GROUPS, OTHER, DeviceWork, PhaseSpans, complement, union, work_of
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_steps

SCHEMA = 1
_MOST_KERNELS = 300
_WAITS = 3  # a driver call has waited if its duration is more than 3 times the usual duration


def finish(run: RunDir) -> None:
    """Read the trace of each rank, and write kernels.json next to the trace. Do nothing without traces. Raise
    TraceError if a trace cannot be read, after the traces of the other ranks."""
    ranks = [run, *(run.of_rank(int(path.name[4:])) for path in sorted(run.profile.glob("rank[0-9]*")))]
    errors = []
    for rank in (each for each in ranks if (each.profile / rundir.TRACE).is_file()):
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


def analyse(trace: Trace, work: Sequence[DeviceWork], step_before_s: float | None = None) -> dict[str, Any]:
    """Return the content of kernels.json. Times are in ms, summed over all profiled steps.

    Args:
        trace: The events of the trace file.
        work: The kernels or operators of the trace, from `work_of`.
        step_before_s: Median time of the steps before profiling, in seconds. Profiled steps are slower. Therefore,
            `busy_share_unprofiled` is the GPU time per step divided by `step_before_s`.
    """
    begin, end = trace.window
    busy = union(((each.begin, each.end) for each in work), begin, end)
    gaps = complement(busy, begin, end)
    busy_ms, total = _length(busy), sum(each.end - each.begin for each in work)
    steps = len(trace.steps)
    before_ms = None if step_before_s is None else step_before_s * 1e3
    groups = _groups(work, total)
    return {
        "schema": SCHEMA,
        "device": "cuda" if trace.kernels else "cpu",
        "gpu": trace.gpu,
        "steps": steps,
        "window_ms": end - begin,
        "step_ms": {"profiled": (end - begin) / steps, "before": before_ms},
        "busy_ms": busy_ms,
        "busy_share": busy_ms / (end - begin),
        "busy_share_unprofiled": min(1.0, busy_ms / steps / before_ms) if before_ms and trace.kernels else None,
        "covered_share": 1 - sum(group["share"] for group in groups if group["group"] == OTHER) if total else None,
        "groups": groups,
        "kernels": _kernels(work, total),
        "phases": _phases(trace, work, gaps),
        "idle": {"ms": _length(gaps), "gaps": len(gaps)},
        "communication": _communication(trace, work),
        "host_waits_ms": _host_waits(trace),
    }


def _host_waits(trace: Trace) -> float | None:
    """Return how long the threads that launch kernels waited in the CUDA driver, in ms. Return None without a GPU.

    A launch waits while the queue of the GPU is full. If launches never wait, the step is launch-bound. The profiler
    slows launches. Without the profiler, the queue fills earlier, and launches wait longer.
    """
    calls = [[span for span in spans if span.kind == "call"] for spans in trace.threads.values()]
    launching = [thread_calls for thread_calls in calls if any(LAUNCH.match(call.name) for call in thread_calls)]
    lengths = sorted(call.end - call.begin for thread_calls in launching for call in thread_calls)
    if not trace.kernels or not lengths:
        return None
    usual = lengths[len(lengths) // 20]  # not the median, because most calls may wait
    return sum(length - usual for length in lengths if length > _WAITS * usual)


def _groups(work: Iterable[DeviceWork], total: float) -> list[dict[str, Any]]:
    sums = _sums(work, lambda each: each.group)
    order = sorted(sums.items(), key=lambda pair: (-pair[1][0], GROUPS.index(pair[0])))
    return [
        {"group": group, "time_ms": time, "share": time / total, "calls": calls}
        for group, (time, calls) in order if total
    ]  # fmt: skip


def _sums(work: Iterable[DeviceWork], key: Callable[[DeviceWork], Any]) -> dict[Any, tuple[float, int]]:
    """Group the work by `key`. Return {key: (time in ms, number of calls)}."""
    sums: dict[Any, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for each in work:
        time, calls = sums[key(each)]
        sums[key(each)] = time + (each.end - each.begin), calls + each.call
    return sums


def _kernels(work: Iterable[DeviceWork], total: float) -> list[dict[str, Any]]:
    """Return one row for each of the 300 (kernel name, group) pairs with the longest time, and one for all others."""
    sums = _sums(work, lambda each: (each.name, each.group))
    order = sorted(sums.items(), key=lambda pair: -pair[1][0])
    rows = [(*key, *both) for key, both in order[:_MOST_KERNELS]]
    if rest := [both for _, both in order[_MOST_KERNELS:]]:
        rows.append((some(len(rest), "other"), OTHER, sum(time for time, _ in rest), sum(calls for _, calls in rest)))
    return [
        {"name": name, "group": group, "time_ms": time, "calls": count, "share": time / total,
         "mean_us": time * 1e3 / count if count else None}
        for name, group, time, count in rows if total
    ]  # fmt: skip


def _phases(trace: Trace, work: Iterable[DeviceWork], gaps: Iterable[tuple[float, float]]) -> list[dict[str, Any]]:
    """Return for each phase, in ms: time of the training thread, time of the launched work, idle time of the GPU."""
    phases = PhaseSpans(trace.phases)
    cpu, device, idle = (defaultdict[str, float](float) for _ in range(3))
    for begin, end, name in trace.phases:
        cpu[name] += end - begin
    for each in work:
        device[each.phase] += each.end - each.begin
    for begin, end in gaps:
        for name, length in phases.within(begin, end):
            idle[name] += length
    names = dict.fromkeys([*cpu, *device])
    return [{"phase": name, "cpu_ms": cpu[name], "device_ms": device[name], "idle_ms": idle[name]} for name in names]


def _communication(trace: Trace, work: Sequence[DeviceWork]) -> dict[str, float] | None:
    """Return the communication time of the profiled steps. Return None without communication.

    Returns:
        `total_ms`, `exposed_ms` (the part during which no other work ran), and `overlap_share` (the share during which
        other work ran).
    """
    begin, end = trace.window
    sent = [(each.begin, each.end) for each in work if each.group == COMMUNICATION]
    if not trace.kernels:  # gloo sends in separate threads
        sent = [(span.begin, span.end) for spans in trace.threads.values() for span in spans
                if span.name.startswith(GLOO)]  # fmt: skip
    intervals = union(sent, begin, end)
    if not intervals:
        return None
    others = union(((each.begin, each.end) for each in work if each.group != COMMUNICATION), begin, end)
    total = _length(intervals)
    exposed = _length(union([*intervals, *others], begin, end)) - _length(others)
    return {"total_ms": total, "exposed_ms": exposed, "overlap_share": 1 - exposed / total}


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in intervals)
