"""Compute the contents of profile/kernels.json from a trace: kernels by group, operators, phases and idle gaps."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ftbench.core.rows import BACKWARD
from ftbench.core.units import some
from ftbench.profile.groups import GROUPS, OTHER
from ftbench.profile.trace import Span, Trace
from ftbench.profile.work import DeviceWork, PhaseSpans, complement, enclosing, union

SCHEMA = 1
_MOST_KERNELS, _MOST_OPERATORS, _MOST_GAPS = 300, 60, 10
_MOST_CAUSES = 3
_WAITS = ("ynchronize", "Malloc", "Free")  # parts of the names of driver calls that wait for the device
PYTHON = "Python between operators"


def analyse(trace: Trace, work: Sequence[DeviceWork], step_before_s: float | None = None) -> dict[str, Any]:
    """Return the document. Times are in ms and cover the profiled window of `steps` steps.

    Args:
        trace: the trace.
        work: the device work of the trace (`work_of`).
        step_before_s: median step before the profiler ran, in seconds. Profiling slows launches, so
            `busy_share_unprofiled` divides the GPU time by this.
    """
    phases = PhaseSpans(trace.phases)
    begin, end = trace.window
    busy = union(((each.begin, each.end) for each in work), begin, end)
    gaps = complement(busy, begin, end)
    busy_ms, total = sum(stop - start for start, stop in busy), sum(each.end - each.begin for each in work)
    steps = len(trace.steps)
    before_ms = None if step_before_s is None else step_before_s * 1e3
    groups, backward = _groups(work, total), sum(each.end - each.begin for each in work if each.phase == BACKWARD)
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
        "backward_share": backward / total if total else None,
        "groups": groups,
        "kernels": _kernels(work, total),
        "operators": _operators(trace, work),
        "phases": _phases(trace, phases, work, gaps),
        "gaps": _longest(trace, phases, gaps, _MOST_GAPS),
        "idle": {"ms": sum(stop - start for start, stop in gaps), "gaps": len(gaps)},
    }


def _groups(work: Iterable[DeviceWork], total: float) -> list[dict[str, Any]]:
    sums = _sums(work, lambda each: each.group)
    order = sorted(sums.items(), key=lambda pair: (-pair[1][0], GROUPS.index(pair[0])))
    return [
        {"group": group, "time_ms": time, "share": time / total, "calls": calls}
        for group, (time, calls) in order if total
    ]  # fmt: skip


def _sums(work: Iterable[DeviceWork], key: Callable[[DeviceWork], Any]) -> dict[Any, tuple[float, int]]:
    """Return the time in ms and the calls by a key of the work."""
    sums: dict[Any, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for each in work:
        time, calls = sums[key(each)]
        sums[key(each)] = time + (each.end - each.begin), calls + each.call
    return sums


def _kernels(work: Iterable[DeviceWork], total: float) -> list[dict[str, Any]]:
    """Return a row per name and group, the longest first, and one row for the rest."""
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


def _operators(trace: Trace, work: Iterable[DeviceWork]) -> list[dict[str, Any]]:
    """Return a row per operator: calls, CPU time with callees, device time of its own kernels. The longest first."""
    device: dict[str, float] = defaultdict(float)
    for each in work:
        device[each.operator] += each.end - each.begin
    cpu: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for spans in trace.threads.values():
        for span in spans:
            if span.kind == "op":
                cpu[span.name] += span.end - span.begin
                calls[span.name] += 1
    order = sorted(cpu, key=lambda name: (-device[name], -cpu[name]))[:_MOST_OPERATORS]
    return [{"name": name, "calls": calls[name], "cpu_ms": cpu[name], "device_ms": device[name]} for name in order]


def _phases(
    trace: Trace, phases: PhaseSpans, work: Iterable[DeviceWork], gaps: Iterable[tuple[float, float]]
) -> list[dict[str, Any]]:
    """Return for each phase: time of the training thread, time of the work launched in it, and device idle time."""
    cpu: dict[str, float] = defaultdict(float)
    device: dict[str, float] = defaultdict(float)
    idle: dict[str, float] = defaultdict(float)
    for begin, end, name in trace.phases:
        cpu[name] += end - begin
    for each in work:
        device[each.phase] += each.end - each.begin
    for begin, end in gaps:
        for name, length in phases.within(begin, end):
            idle[name] += length
    names = dict.fromkeys([*cpu, *device])
    return [{"phase": name, "cpu_ms": cpu[name], "device_ms": device[name], "idle_ms": idle[name]} for name in names]


# --- idle gaps -------------------------------------------------------------------------------------------------------


def _longest(trace: Trace, phases: PhaseSpans, gaps: list[tuple[float, float]], most: int) -> list[dict[str, Any]]:
    """Return the longest gaps, each with its main phase and the CPU activity by time.

    CPU activity is waiting driver calls and outermost operators of any thread. The rest is Python.
    """
    outermost = [_outermost(spans) for spans in trace.threads.values()]
    rows = []
    for begin, end in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:most]:
        within = dict[str, float]()
        for name, length in phases.within(begin, end):
            within[name] = within.get(name, 0.0) + length
        rows.append({
            "begin_ms": begin, "ms": end - begin,
            "phase": max(within, key=lambda name: within[name]) if within else None,
            "meanwhile": _meanwhile(outermost, begin, end),
        })  # fmt: skip
    return rows


def _outermost(spans: list[Span]) -> list[Span]:
    """Return operators without an enclosing operator, and waiting driver calls, which explain a gap better."""
    return [
        span for span in spans
        if (span.kind == "op" and not any(each.kind == "op" for each in enclosing(span)))
        or (span.kind == "call" and any(wait in span.name for wait in _WAITS))
    ]  # fmt: skip


def _meanwhile(threads: list[list[Span]], begin: float, end: float) -> list[dict[str, Any]]:
    times: dict[str, float] = defaultdict(float)
    ran: list[tuple[float, float]] = []
    for spans in threads:
        # Spans are sorted by begin. Outermost spans overlap only with the driver calls inside them.
        for index in range(max(0, bisect_left(spans, begin, key=lambda span: span.begin) - 2), len(spans)):
            span = spans[index]
            if span.begin >= end:
                break
            if (length := min(span.end, end) - max(span.begin, begin)) > 0:
                times[span.name] += length
                ran.append((span.begin, span.end))
    python = sum(stop - start for start, stop in complement(union(ran, begin, end), begin, end))
    if python > 0:
        times[PYTHON] = python
    order = sorted(times, key=lambda name: -times[name])[:_MOST_CAUSES]
    return [{"name": name, "ms": times[name]} for name in order]
