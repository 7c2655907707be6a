"""Read a PyTorch trace file (Chrome trace-event format, written by Kineto).

Times are milliseconds since the first profiled step. The spans of a thread are nested.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ftbench.core.rows import PREFIX
from ftbench.errors import FtbenchError

MOST_BYTES = 2**30
_STEP = re.compile(r"ProfilerStep#(\d+)$")
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
GLOO = "gloo:"  # prefix of spans in gloo's threads
_KINDS = {"cpu_op": "op", "user_annotation": "range", "cuda_runtime": "call", "cuda_driver": "call"}
LAUNCH = re.compile(r"cu(da)?(Graph)?Launch")
_LEAST_SEEN = 0.99  # share of launches with a recorded kernel


class TraceError(FtbenchError):
    """Raised if a trace cannot be read, or if too many kernels are missing in the trace."""


@dataclass(slots=True)
class Span:
    """A time span of a CPU thread or of the GPU, from `begin` to `end` in ms.

    `kind` is `op` (operator), `range` (annotation), `call` (driver API) or `kernel` (GPU). An operator and its backward
    operator have the same `sequence` number.
    """

    name: str
    begin: float
    end: float
    kind: str
    sequence: int | None = None
    backward: bool = False
    correlation: int | None = None
    parent: Span | None = None


@dataclass(slots=True)
class Trace:
    """The events of a trace file. Times are in ms.

    `steps` is a sorted list of (begin, end), and `phases` of (begin, end, name). `threads` has the spans of each
    thread, sorted by begin. `gpu` is the name of the first GPU in the file.
    """

    gpu: str | None = None
    kernels: list[Span] = field(default_factory=list)
    threads: dict[Any, list[Span]] = field(default_factory=dict)
    steps: list[tuple[float, float]] = field(default_factory=list)
    phases: list[tuple[float, float, str]] = field(default_factory=list)

    @property
    def window(self) -> tuple[float, float]:
        """The profiled time in ms: (start of the first step, end of the last step or of its last kernel)."""
        return self.steps[0][0], max([self.steps[-1][1], *(kernel.end for kernel in self.kernels)])


def read(path: Path) -> Trace:
    """Return the trace in a .json.gz file. Raise TraceError if the file is invalid or has no profiled step."""
    trace = Trace()
    try:
        gpus = _read_events(path, trace).get("deviceProperties") or [{}]
        trace.gpu = gpus[0].get("name")
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(f"{path}: cannot be read as a trace ({error}); profile again") from None
    if not trace.steps:
        raise TraceError(f"{path}: contains no profiled step; profile again")
    _settle(trace)
    _check_gpu(trace, path)
    return trace


def _read_events(path: Path, trace: Trace) -> dict[str, Any]:
    """Parse a trace file. Add its events to `trace` one by one, to save memory. Return the other keys of the file."""

    def keep(value: dict[str, Any]) -> dict[str, Any] | None:
        if "ph" not in value:
            return value
        _keep(trace, value)
        return None

    with gzip.open(path) as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise TraceError(f"{path}: larger than {MOST_BYTES >> 30} GiB; profile fewer steps (--steps 1)")
    document: dict[str, Any] = json.loads(text.decode(errors="replace"), strict=False, object_hook=keep)
    document["traceEvents"]  # raises KeyError for other documents
    return document


def _keep(trace: Trace, event: dict[str, Any]) -> None:
    if event["ph"] != "X":
        return
    kind, name = event.get("cat"), event.get("name", "")
    begin = float(event["ts"]) / 1e3
    end = begin + float(event.get("dur", 0.0)) / 1e3
    details = event.get("args", {})
    if kind in _ON_GPU:
        trace.kernels.append(Span(name, begin, end, "kernel", correlation=int(details.get("correlation", 0))))
    elif kind == "user_annotation" and _STEP.match(name):
        trace.steps.append((begin, end))
    elif kind == "user_annotation" and name.startswith(PREFIX):
        trace.phases.append((begin, end, name.removeprefix(PREFIX)))
    elif kind in _KINDS:
        span = Span(name, begin, end, _KINDS[kind], details.get("Sequence number"),
                    bool(details.get("Fwd thread id")), int(details.get("correlation", 0)))  # fmt: skip
        trace.threads.setdefault(event.get("tid"), []).append(span)


def _settle(trace: Trace) -> None:
    """Shift all times to start at the first step, sort the events, and set the parent of each span."""
    trace.steps.sort()
    origin = trace.steps[0][0]
    trace.steps = [(begin - origin, end - origin) for begin, end in trace.steps]
    trace.phases = sorted((begin - origin, end - origin, name) for begin, end, name in trace.phases)
    for span in chain(trace.kernels, *trace.threads.values()):
        span.begin, span.end = span.begin - origin, span.end - origin
    trace.kernels = sorted((k for k in trace.kernels if k.end > 0), key=lambda kernel: kernel.begin)
    for spans in trace.threads.values():
        spans.sort(key=lambda span: (span.begin, -span.end))
        stack: list[Span] = []
        for span in spans:
            while stack and stack[-1].end <= span.begin:
                stack.pop()
            span.parent = stack[-1] if stack else None
            stack.append(span)


def _check_gpu(trace: Trace, path: Path) -> None:
    """Raise TraceError if the profiler lost more than 1 % of the kernels, because the GPU would seem to be idle."""
    calls = (span for spans in trace.threads.values() for span in spans if span.kind == "call")
    launched = {call.correlation for call in calls if LAUNCH.match(call.name)}
    seen = len(launched & {kernel.correlation for kernel in trace.kernels})
    if seen < _LEAST_SEEN * len(launched):
        lost = f"the profiler lost GPU work: {seen:,} of {len(launched):,} launches have a kernel"
        raise TraceError(f"{path}: {lost}; profile fewer steps (--steps 1)")
