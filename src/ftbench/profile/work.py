"""Device work of a trace: each kernel or operator with its group, its operator and its phase of the step."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ftbench.core.rows import LOSS, OTHER
from ftbench.profile.groups import group_of_kernel, group_of_operator
from ftbench.profile.trace import Span, Trace


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A kernel or, without a GPU, an interval of an operator's own time.

    `operator` is the innermost operator that launched it, or empty. `call` is 1 for the first interval of an operator
    and 0 for the others.
    """

    name: str
    group: str
    begin: float
    end: float
    operator: str
    phase: str
    call: int = 1


class PhaseSpans:
    """The phases of the training thread over time. Work of other threads, such as autograd's, belongs to them."""

    def __init__(self, phases: list[tuple[float, float, str]]) -> None:
        self._phases = phases
        self._begins = [begin for begin, _, _ in phases]

    def at(self, time: float) -> str:
        index = bisect_right(self._begins, time) - 1
        if index >= 0 and time <= self._phases[index][1]:
            return self._phases[index][2]
        return OTHER

    def within(self, begin: float, end: float) -> Iterator[tuple[str, float]]:
        """Yield the phases within an interval and their duration in it."""
        for index in range(max(0, bisect_right(self._begins, begin) - 1), len(self._phases)):
            start, stop, name = self._phases[index]
            if start >= end:
                return
            if (length := min(stop, end) - max(start, begin)) > 0:
                yield name, length


def work_of(trace: Trace) -> list[DeviceWork]:
    """Return the device work sorted by begin: kernels and copies, or operators on a CPU."""
    phases = PhaseSpans(trace.phases)
    loss = _loss_sequences(trace, phases)
    return list(_on_gpu(trace, phases, loss) if trace.kernels else _on_cpu(trace, phases, loss))


def _on_gpu(trace: Trace, phases: PhaseSpans, loss: set[int]) -> Iterator[DeviceWork]:
    calls = {
        span.correlation: span for spans in trace.threads.values() for span in spans
        if span.kind == "call" and span.correlation
    }  # fmt: skip
    for kernel in trace.kernels:
        call = calls.get(kernel.correlation or 0)
        around = list(enclosing(call))
        operators = [span.name for span in around if span.kind == "op"]
        phase = phases.at(call.begin) if call else OTHER
        group = group_of_kernel(
            kernel.name, (span.name for span in around), phase, any(_of_loss(span, loss) for span in around)
        )
        yield DeviceWork(kernel.name, group, kernel.begin, kernel.end, next(iter(operators), ""), phase)


def _on_cpu(trace: Trace, phases: PhaseSpans, loss: set[int]) -> list[DeviceWork]:
    stretches = [
        work for spans in trace.threads.values()
        for work in _own_time([span for span in spans if span.kind == "op"], phases, loss)
    ]  # fmt: skip
    return sorted(stretches, key=lambda work: work.begin)


def _own_time(spans: list[Span], phases: PhaseSpans, loss: set[int]) -> Iterator[DeviceWork]:
    """Yield the intervals in which an operator ran without a callee."""
    stack: list[Span] = []
    begun: set[int] = set()
    begin = 0.0

    def stretch(until: float) -> Iterator[DeviceWork]:
        if stack and until > begin:
            span = stack[-1]
            around = list(enclosing(span))
            phase, first = phases.at(span.begin), id(span) not in begun
            begun.add(id(span))
            group = group_of_operator(
                span.name, (each.name for each in around), phase, any(_of_loss(each, loss) for each in (span, *around))
            )
            yield DeviceWork(span.name, group, begin, until, span.name, phase, int(first))

    for span in spans:
        while stack and stack[-1].end <= span.begin:
            yield from stretch(stack[-1].end)
            begin = max(begin, stack.pop().end)
        yield from stretch(span.begin)
        stack.append(span)
        begin = span.begin
    while stack:
        yield from stretch(stack[-1].end)
        begin = max(begin, stack.pop().end)


def enclosing(span: Span | None) -> Iterator[Span]:
    """Yield the spans around a span, innermost first, without driver calls."""
    while span is not None and (span := span.parent) is not None:
        if span.kind != "call":
            yield span


def _loss_sequences(trace: Trace, phases: PhaseSpans) -> set[int]:
    """Return the sequence numbers of the loss's operators, which their backward passes share."""
    return {
        span.sequence for spans in trace.threads.values() for span in spans
        if span.sequence is not None and not span.backward and phases.at(span.begin) == LOSS
    }  # fmt: skip


def _of_loss(span: Span, loss: set[int]) -> bool:
    return span.backward and span.sequence in loss


def union(stretches: Iterable[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """Return the union of intervals within a window, sorted and without overlaps."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(stretches):
        start, stop = max(start, begin), min(stop, end)
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def complement(busy: list[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """Return the parts of a window outside a `union`."""
    edges = [begin, *(edge for stretch in busy for edge in stretch), end]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if stop > start]
