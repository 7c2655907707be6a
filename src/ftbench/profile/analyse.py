"""A trace → the document of profile/kernels.json: kernels by group, operators, phases, idle gaps. Times in ms."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ftbench.core.phases import BACKWARD
from ftbench.core.units import some
from ftbench.profile.gaps import longest
from ftbench.profile.groups import GROUPS, OTHER
from ftbench.profile.trace import Trace
from ftbench.profile.work import DeviceWork, PhaseSpans, complement, union

SCHEMA = 1
_MOST_KERNELS, _MOST_OPERATORS, _MOST_GAPS = 300, 60, 10


def analyse(trace: Trace, work: Sequence[DeviceWork], step_before_s: float | None = None) -> dict[str, Any]:
    """Return the document; `work` is that of the trace (`work_of`). All totals are of the whole window, `steps` long;
    shares of kernels and groups are of the time that kernels took. `step_before_s` is the median step before the
    profiler ran, in seconds: profiling makes launches slower, so `busy_share_unprofiled` holds the GPU's time against
    that."""
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
        "gaps": longest(trace, phases, gaps, _MOST_GAPS),
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
    """Return time and calls of the work by a key of it."""
    sums: dict[Any, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for each in work:
        time, calls = sums[key(each)]
        sums[key(each)] = time + (each.end - each.begin), calls + each.call
    return sums


def _kernels(work: Iterable[DeviceWork], total: float) -> list[dict[str, Any]]:
    """Return a row for each name and group, as one name may serve several; the longest first, what is left in one
    line."""
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
    """Return a row for each name: how often, how long with all that it called, how long its own kernels took; the
    longest on the device first, then on the CPU."""
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
    """Return for each part of a step: how long the training thread was in it, how long the work took that was launched
    in it, and how long the device was idle meanwhile."""
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
