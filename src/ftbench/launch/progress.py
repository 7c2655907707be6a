"""Read the progress of a running worker from its files, and decide whether the worker hangs."""

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

START_S = 1800.0  # limit before the third step, while weights are downloaded and kernels are compiled and tuned
STEP_S = 300.0  # minimum for later steps: a new shape, a slow disk
COMPILE_S = 900.0  # minimum if a new shape is compiled again
_RECENT = 20  # steps used for the remaining time
PATIENCE = 20  # longest time without progress, relative to the slowest step so far


class Progress:
    """Progress of a run. `changed` is the time of the last progress, in seconds of the monotonic clock."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.phase = ""
        self.last: StepRow | None = None
        self.steps = 0
        self.slowest_s = 0.0
        self.begun = self.changed = time.monotonic()
        self._stepped = self.begun  # time of the last step
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
        if self.phase != "train":  # during training only steps count as progress
            self._grown(self.run.log)

    def _grown(self, path: Path) -> bool:
        """Return whether the size or the modification time of a file has changed since the last call."""
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
        """The total number of steps of the run, or None if it is not known yet."""
        step, ratio = (self.last.step, self.last.progress_ratio) if self.last else (None, None)
        return round(step / ratio) if step and ratio else None

    def left_s(self) -> float | None:
        """Return the remaining seconds of the training, from the duration of recent steps. Return None before the
        second step."""
        if self.planned is None or len(self._pace) < 2:
            return None
        (first, begun), (last, ended) = self._pace[0], self._pace[-1]
        left = (self.planned - last) * (ended - begun) / max(1, last - first)
        return max(0.0, left - (time.monotonic() - self._stepped))

    def text(self) -> str:
        """Return the progress as one line of text, such as `step 3 of 20 · 149 tokens/s`, or `starting` at first."""
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
        return " · ".join(part for part in (step, speed, loss, rest, done, share, memory) if part)


class Watchdog:
    """Decide whether a run must end: after its timeout, at the sweep's deadline, or if it makes no progress."""

    def __init__(self, spec: Experiment, progress: Progress, deadline: float | None = None) -> None:
        """Start the timeout of the run. `deadline` is the end of the sweep's time budget (monotonic clock, seconds)."""
        self._launch, self._progress, self._deadline = spec.launch, progress, deadline
        self._floor = COMPILE_S if spec.optimizations.compile else STEP_S
        self._begin = time.monotonic()

    def check(self) -> Stop | None:
        now, timeout = time.monotonic(), self._launch.timeout_s
        if self._progress.phase == WAITING:  # another run uses the GPU
            self._begin = self._progress.changed = now
        if timeout is not None and now > self._begin + timeout:
            return Stop("timeout", f"not finished after launch.timeout_s = {timeout:g} seconds")
        if self._deadline is not None and now > self._deadline:
            return Stop("interrupted", "the sweep's time budget ran out")
        if (limit := self.limit_s()) is not None and (still := now - self._progress.changed) > limit:
            where = f"after step {self._progress.steps}" if self._progress.steps else "before the first step"
            doing = f" in {self._progress.phase.replace('_', ' ')}" if self._progress.phase else ""
            return Stop("timeout", f"no progress for {seconds(still)} {where}{doing} (launch.no_step_s)")
        return None

    def limit_s(self) -> float | None:
        """Return the longest allowed time without progress in seconds. With `no_step_s: auto`, the time depends on the
        slowest step of the run. Return None if the limit is off."""
        limit = self._launch.no_step_s
        if limit == "off":
            return None
        if limit != "auto":
            return limit
        if self._progress.phase != "train" or self._progress.steps < 3:
            return START_S
        return max(self._floor, PATIENCE * self._progress.slowest_s)
