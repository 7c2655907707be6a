"""What the CPU did while the device had nothing to do."""

from bisect import bisect_left
from collections import defaultdict
from typing import Any

from ftbench.profile.trace import Span, Trace
from ftbench.profile.work import PhaseSpans, complement, enclosing, union

_MOST_CAUSES = 3
_WAITS = ("ynchronize", "Malloc", "Free")  # in the names of calls that wait for the device
PYTHON = "Python between operators"


def longest(trace: Trace, phases: PhaseSpans, gaps: list[tuple[float, float]], most: int) -> list[dict[str, Any]]:
    """Return the longest gaps, each with the phase that it mostly lies in and what ran on the CPU meanwhile, by time:
    waits of the driver's library and outermost operators of any thread, and Python where none of them ran."""
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
    """Return operators that no other called, and calls of the driver's library: those within an operator too, for one
    that waits explains more than the operator that waits."""
    return [
        span for span in spans
        if (span.kind == "op" and not any(each.kind == "op" for each in enclosing(span)))
        or (span.kind == "call" and any(wait in span.name for wait in _WAITS))
    ]  # fmt: skip


def _meanwhile(threads: list[list[Span]], begin: float, end: float) -> list[dict[str, Any]]:
    times: dict[str, float] = defaultdict(float)
    ran: list[tuple[float, float]] = []
    for spans in threads:
        # Spans are sorted by their begin and the outermost do not overlap, but for the calls within them.
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
