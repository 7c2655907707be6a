"""Who did what for whom: each stretch of the device's work with its group, its operator and its phase of the step."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ftbench.core.phases import LOSS, OTHER
from ftbench.profile.groups import group_of_kernel, group_of_operator
from ftbench.profile.trace import Span, Trace


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A kernel; without a GPU, a stretch in which an operator itself ran. `operator` is the innermost one that launched
    it, empty where none is known; `call` counts a thing that was begun once and ran in several stretches once."""

    name: str
    group: str
    begin: float
    end: float
    operator: str
    phase: str
    call: int = 1


class PhaseSpans:
    """Which part of a step the training thread was in, and when. Other threads work for it: a backward pass runs in
    one of autograd's."""

    def __init__(self, phases: list[tuple[float, float, str]]) -> None:
        self._phases = phases
        self._begins = [begin for begin, _, _ in phases]

    def at(self, time: float) -> str:
        index = bisect_right(self._begins, time) - 1
        if index >= 0 and time <= self._phases[index][1]:
            return self._phases[index][2]
        return OTHER

    def within(self, begin: float, end: float) -> Iterator[tuple[str, float]]:
        """Return the phases of a stretch and how long each lasts in it."""
        for index in range(max(0, bisect_right(self._begins, begin) - 1), len(self._phases)):
            start, stop, name = self._phases[index]
            if start >= end:
                return
            if (length := min(stop, end) - max(start, begin)) > 0:
                yield name, length


def work_of(trace: Trace) -> list[DeviceWork]:
    """Return what the device did, in the order of its beginning: kernels and copies, or on a CPU the operators
    themselves."""
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
    """Return the stretches in which an operator ran and none that it had called."""
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
    """Return what a span happened in, innermost first; calls of the driver's library are left out."""
    while span is not None and (span := span.parent) is not None:
        if span.kind != "call":
            yield span


def _loss_sequences(trace: Trace, phases: PhaseSpans) -> set[int]:
    """Return the numbers that join the loss's operators with their backward passes."""
    return {
        span.sequence for spans in trace.threads.values() for span in spans
        if span.sequence is not None and not span.backward and phases.at(span.begin) == LOSS
    }  # fmt: skip


def _of_loss(span: Span, loss: set[int]) -> bool:
    return span.backward and span.sequence in loss


def union(stretches: Iterable[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """Return stretches as few that do not overlap, cut to the window, in order."""
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
    """Return what a `union` leaves of its window."""
    edges = [begin, *(edge for stretch in busy for edge in stretch), end]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if stop > start]
