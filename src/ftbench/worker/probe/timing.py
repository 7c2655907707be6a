"""Measure the best and the sustained time of a call, in batches between device events, with the recorder's clock
(`worker/measure/meters.py`)."""

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ftbench.worker.measure.meters import Clock
from ftbench.worker.measure.sampler import Sampler

BATCH_S = 0.02  # much longer than the resolution of an event (0.5 µs) and the gap between batches (tens of µs)
MINIMUM_BATCHES = 5
SAMPLE_S = 0.1

Call = Callable[[], object]


class Budget:
    """A time budget in wall-clock seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the remaining seconds. The number is negative after the end."""
        return self._end - time.monotonic()


def first_call(call: Call, clock: Clock) -> float:
    """Return the seconds of the second call. The first one loads and selects kernels."""
    call()
    return timed_batch(call, 1, clock)


def best(call: Call, clock: Clock, seconds: float, estimate: float) -> float:
    """Return the seconds of one call: the median of the faster half of the batches.

    Interrupts, other processes and rising clocks only make batches slower, so the slower half is ignored. The single
    fastest batch varies more between measurements than this median.

    Args:
        call: The call.
        clock: The clock.
        seconds: Total time of all batches.
        estimate: Estimated seconds of one call.
    """
    count = batch_size(estimate)
    end = time.perf_counter() + seconds / 3
    while time.perf_counter() < end:  # warm-up of clocks and caches
        timed_batch(call, count, clock)
    times: list[float] = []
    end = time.perf_counter() + seconds * 2 / 3
    while len(times) < MINIMUM_BATCHES or time.perf_counter() < end:
        times.append(timed_batch(call, count, clock))
    return faster_half(times)


def faster_half(times: list[float]) -> float:
    """Return the median of the faster half (rounded up) of the times."""
    return statistics.median(sorted(times)[: math.ceil(len(times) / 2)])


def batch_size(estimate: float) -> int:
    """Return the number of calls per batch if one takes `estimate` seconds."""
    return max(1, math.ceil(BATCH_S / max(estimate, 1e-7)))


def timed_batch(call: Call, count: int, clock: Clock) -> float:
    """Return the seconds per call of `count` calls, including the wait for the device."""
    begin = clock.mark()
    for _ in range(count):
        call()
    end = clock.mark()
    clock.wait()
    return clock.seconds(begin, end) / count


@dataclass(frozen=True, slots=True)
class Lasting:
    """A sustained rate: `seconds` per call over a window from `begin` to `end` (perf_counter)."""

    seconds: float
    begin: float
    end: float


def lasting(call: Call, clock: Clock, seconds: float, estimate: float) -> Lasting:
    """Return the mean over the last two thirds of `seconds` under continuous load, after clocks and power have settled.
    It is a mean because throttling belongs to the sustained rate."""
    count = batch_size(estimate)
    start = time.perf_counter()
    marks = [clock.mark()]
    settled: tuple[int, float] | None = None
    while True:
        for _ in range(count):
            call()
        marks.append(clock.mark())
        while not clock.done(marks[-2]):
            time.sleep(0.0005)
        now = time.perf_counter()
        if settled is None and now - start >= seconds / 3:
            settled = len(marks) - 2, now
        if settled is not None and now - start >= seconds and len(marks) - 1 > settled[0]:
            break
    clock.wait()
    first, begin = settled
    return Lasting(clock.seconds(marks[first], marks[-1]) / (count * (len(marks) - 1 - first)), begin, now)


@contextmanager
def watching(sampler: Sampler | None) -> Iterator[None]:
    """Sample the driver's counters ten times per second within the block."""
    stop = threading.Event()

    def watch() -> None:
        while sampler is not None and not stop.wait(SAMPLE_S):
            sampler.take()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def during(sampler: Sampler | None, begin: float, end: float) -> dict[str, Any]:
    """Return power (W), clock (MHz), temperature (°C) and throttle reasons between two times, None if unknown."""
    seen = sampler.over(begin, end) if sampler else {}
    return {name: seen.get(name) for name in ("power_w", "sm_clock_mhz", "temperature_c", "throttle")}
