"""Communication between ranks, from the trace of one rank: time, overlap with other work, bytes, and the time at the
probed network rate."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ftbench.profile.groups import COMMUNICATION
from ftbench.profile.trace import GLOO, Collective, Trace
from ftbench.profile.work import DeviceWork, union

# Times that each byte of a collective crosses a GPU's link in a ring of n (nccl-tests, PERFORMANCE.md).
_KINDS: dict[str, tuple[str, Callable[[int], float]]] = {
    "all-reduce": (r"all_?reduce", lambda n: 2 * (n - 1) / n),
    "reduce-scatter": (r"reduce_?scatter", lambda n: (n - 1) / n),
    "all-gather": (r"all_?gather", lambda n: (n - 1) / n),
    "all-to-all": (r"all_?to_?all", lambda n: (n - 1) / n),
    "broadcast": (r"broadcast", lambda n: 1.0),
    "send and receive": (r"send|recv", lambda n: 1.0),
}


def communication(
    trace: Trace, work: Sequence[DeviceWork], ranks: int, network_gbs: float | None
) -> dict[str, Any] | None:
    """Return the communication of the profiled steps, or None without any.

    Returns:
        `total_ms` of communication, `exposed_ms` without other work at the same time, `overlap_share` (the rest), and a
        row per kind of collective with calls and bytes.
    """
    begin, end = trace.window
    sent = [(each.begin, each.end) for each in work if each.group == COMMUNICATION]
    if not trace.kernels:  # gloo sends in separate threads
        sent = [(span.begin, span.end) for spans in trace.threads.values() for span in spans
                if span.name.startswith(GLOO)]  # fmt: skip
    stretches = union(sent, begin, end)
    if not stretches:
        return None
    others = union(((each.begin, each.end) for each in work if each.group != COMMUNICATION), begin, end)
    total = _length(stretches)
    hidden = total + _length(others) - _length(union([*stretches, *others], begin, end))
    rows = _collectives(trace.collectives, ranks, network_gbs)
    return {
        "ranks": ranks, "steps": len(trace.steps), "total_ms": total, "exposed_ms": total - hidden,
        "overlap_share": hidden / total, "collectives": rows, "network_gbs": network_gbs,
        "at_network_ms": _sum(row["at_network_ms"] for row in rows),
    }  # fmt: skip


def _length(stretches: Iterable[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in stretches)


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if not known or None in known else sum(value or 0.0 for value in known)


def _collectives(seen: Sequence[Collective], ranks: int, network_gbs: float | None) -> list[dict[str, Any]]:
    """Return calls and bytes by kind, the most bytes first. Bytes count the full tensor over all ranks."""
    sizes: dict[str, list[int | None]] = defaultdict(list)
    for each in seen:
        for kind in [kind for kind, (name, _) in _KINDS.items() if re.search(name, each.name, re.IGNORECASE)][:1]:
            sizes[kind].append(each.size)
    rows = []
    for kind, known in sizes.items():
        size = _sum(known)
        at_rate = None if size is None or not network_gbs else size * _KINDS[kind][1](ranks) / network_gbs / 1e6
        rows.append({"kind": kind, "calls": len(known), "bytes": size, "at_network_ms": at_rate})
    return sorted(rows, key=lambda row: -(row["bytes"] or 0))
