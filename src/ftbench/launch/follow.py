"""What a run's files say while it runs, and the watchdog over them. Reads only what has grown."""

import time
from collections import deque
from pathlib import Path

from ftbench.core import units
from ftbench.core.rows import StepRow
from ftbench.core.units import gibibytes, seconds
from ftbench.launch.process import Stop
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import WAITING, RunDir, read_json
from ftbench.store.steps import StepsTail

START_S = 1800.0  # without any sign of life before the third step: weights are fetched, kernels compiled and tuned
STEP_S = 300.0  # the least that is waited for a step later on: a new shape, a slow disk
COMPILE_S = 900.0  # the same where a new shape means compiling again
_LEAST_RATIO = 1e-9
_RECENT = 20  # steps by which the rest is reckoned
PATIENCE = 20  # times the slowest step so far


class Follower:
    """A run in progress. `changed` is when (monotonic clock, s) any of its files last changed."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.phase = ""
        self.last: StepRow | None = None
        self.steps = 0
        self.slowest_s = 0.0
        self.begun = self.changed = time.monotonic()
        self._stepped = self.begun  # when the last step was seen
        self._pace: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._tail: StepsTail | None = None
        self._seen: dict[Path, tuple[int, int]] = {}

    def poll(self) -> None:
        if self._grown(self.run.phases):
            phases = read_json(self.run.phases).get("phases")
            self.phase = str(phases[-1].get("name", "")) if phases else ""
        steps = self.run.steps if self.run.steps.exists() else self.run.of_rank(0).steps
        if self._grown(steps):
            self._tail = self._tail or StepsTail(steps)
            for row in self._tail.read():
                if row.phase == "train":
                    self.last = row
                    self.steps += 1
                    self._stepped = time.monotonic()
                    if row.step is not None and row.elapsed_time_sec is not None:
                        self._pace.append((row.step, row.elapsed_time_sec))
                    self.slowest_s = max(self.slowest_s, row.step_time_s or 0.0)
        if self.phase != "train":  # a log line in the middle of training is no step
            self._grown(self.run.log)

    def _grown(self, path: Path) -> bool:
        """Return whether a file's size or time is another than at the last look; a clock set back is no matter."""
        try:
            status = path.stat()
        except OSError:
            return False
        now = (status.st_size, status.st_mtime_ns)
        if self._seen.get(path) == now:
            return False
        self._seen[path] = now
        self.changed = time.monotonic()
        return True

    @property
    def planned(self) -> int | None:
        """How many steps the run will have, where its last one says it."""
        ratio = self.last.progress_ratio if self.last else None
        return (
            round(self.last.step / ratio) if self.last and self.last.step and ratio and ratio > _LEAST_RATIO else None
        )

    def left_s(self) -> float | None:
        """Return the seconds until the last step, by the pace of the recent ones; None before there are two."""
        if self.planned is None or len(self._pace) < 2:
            return None
        (first, begun), (last, ended) = self._pace[0], self._pace[-1]
        if last <= first or ended < begun:
            return None
        left = (self.planned - last) * (ended - begun) / (last - first)
        return max(0.0, left - (time.monotonic() - self._stepped))

    def text(self) -> str:
        """Return one line on where the run stands; `starting` before its first word."""
        if self.last is None:
            return self.phase.replace("_", " ") or "starting"
        last, left = self.last, self.left_s()
        step = f"step {last.step}" + (f" of {self.planned}" if self.planned else "")
        share = units.percent(last.progress_ratio, 0) if last.progress_ratio is not None else ""
        rest = f"about {seconds(left)} left" if left and self.phase in ("", "train") else ""
        done = self.phase.replace("_", " ") if self.phase not in ("", "train") else ""
        speed = f"{last.real_tokens / last.step_time_s:,.0f} tokens/s" if last.real_tokens and last.step_time_s else ""
        memory = f"{gibibytes(last.peak_memory_gb)} GiB" if last.peak_memory_gb is not None else ""
        loss = f"loss {last.loss:.3f}" if last.loss is not None else ""
        return " · ".join(part for part in (step, share, speed, memory, loss, rest, done) if part)


class Watchdog:
    """Says when a run has to be ended: its time is up, the sweep's is, or nothing moves any more."""

    def __init__(self, spec: Experiment, follower: Follower, deadline: float | None = None) -> None:
        """`deadline` (monotonic clock, s) is the sweep's."""
        self._launch, self._follower, self._deadline = spec.launch, follower, deadline
        self._floor = COMPILE_S if spec.optimizations.compile else STEP_S
        self._begin = time.monotonic()

    def check(self) -> Stop | None:
        now, timeout = time.monotonic(), self._launch.timeout_s
        if self._follower.phase == WAITING:  # another run's time
            self._begin = self._follower.changed = now
        if timeout is not None and now > self._begin + timeout:
            return Stop("timeout", f"not done after launch.timeout_s = {timeout:g} seconds")
        if self._deadline is not None and now > self._deadline:
            return Stop("interrupted", "the sweep's time budget ran out")
        if (limit := self.limit_s()) is not None and (still := now - self._follower.changed) > limit:
            where = f"after step {self._follower.steps}" if self._follower.steps else "before the first step"
            doing = f" in {self._follower.phase.replace('_', ' ')}" if self._follower.phase else ""
            return Stop("timeout", f"nothing moved for {seconds(still)} {where}{doing} (launch.no_step_s)")
        return None

    def limit_s(self) -> float | None:
        """Return how long nothing may move just now, learned from the run's steps once it has three; None for ever."""
        limit = self._launch.no_step_s
        if limit == "off":
            return None
        if limit != "auto":
            return limit
        if self._follower.phase != "train" or self._follower.steps < 3:
            return START_S
        return max(self._floor, PATIENCE * self._follower.slowest_s)
