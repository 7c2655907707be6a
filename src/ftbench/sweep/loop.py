"""The loop of a sweep: keep all GPU slots busy, update the tables after each run, and stop on a signal or deadline.

One thread per run waits for the child process. Only the main thread starts jobs and writes files.
"""

import os
import select
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ftbench.core.units import seconds
from ftbench.errors import INTERRUPTED, FtbenchError
from ftbench.launch import outcome, process
from ftbench.launch.live import LiveView
from ftbench.launch.runner import FinishedRun
from ftbench.store import rundir
from ftbench.sweep.gpu_slots import GpuSlot, RunControl
from ftbench.sweep.output import status
from ftbench.sweep.output.table import BOARD, Tables
from ftbench.sweep.plan.base import FAILED, Job, Plan
from ftbench.sweep.plan.search import Search

SCHEMA = 1
_TICK_S = 0.5
_SPACING = 20  # pause between two updates of the tables, relative to the duration of an update


@dataclass(slots=True)
class RunningJob:
    """A running job with its slot, a pipe to end the run, the start time, the progress as text, and the result."""

    job: Job
    slot: GpuSlot
    pipe: tuple[int, int]
    begun: float
    text: str = "starting"
    result: Future[FinishedRun] = field(default_factory=Future)


@dataclass(slots=True)
class Session:
    """One session of a sweep. `source` is the content of the spec file. `deadline` is a monotonic time in seconds."""

    source: bytes
    plan: Plan
    slots: Sequence[GpuSlot]
    tables: Tables
    view: LiveView
    deadline: float | None = None
    _running: list[RunningJob] = field(default_factory=list)
    _pool: ThreadPoolExecutor = field(init=False)
    _stopping: str | None = None
    _error: FtbenchError | None = None
    _wake: tuple[int, int] = (-1, -1)
    _tables_due: float = 0.0

    def run(self) -> int:
        """Run jobs until all are done, the time budget is used up, or a signal arrives.

        Return the exit code: 0 for success, 1 if a run failed, 130 after a signal. Raise MissingError for a full disk.
        """
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with ThreadPoolExecutor(len(self.slots)) as self._pool:
            try:
                with process.signals() as signals:
                    self._loop(signals)
            finally:
                self._end_runs()
        self._write(last=True)
        if self._error is not None:
            raise self._error
        failed = FAILED if self._stopping else (*FAILED, "interrupted")  # another program ended the run
        code = int(any(current.state in failed for current in self.plan.statuses.values()))
        return INTERRUPTED if self._stopping == "signal" else code

    def _loop(self, signals: int) -> None:
        for job, current in self.plan.statuses.items():
            if current.done and current.state != "skipped":
                outcome.finish_killed(job.run)
        self._write_board()
        while True:
            self._fill()
            if not self._running:
                return
            ready, _, _ = select.select([signals, self._wake[0]], [], [], _TICK_S)
            if signals in ready:
                os.read(signals, 1)
                self._stop("signal")
            if self._wake[0] in ready:
                os.read(self._wake[0], 4096)
            for running in [each for each in self._running if each.result.done()]:
                self._take(running)
            self._show()

    def _fill(self) -> None:
        """Start a job in each free slot."""
        taken = [running.slot for running in self._running]
        for slot in self.slots:
            if self._stopping or slot in taken:
                continue
            if (job := self.plan.next(self._has_time)) is None:
                return
            self._start(job, slot)

    def _has_time(self, job: Job) -> bool:
        if self.deadline is None:
            return True
        left = self.deadline - time.monotonic()
        needed = self.plan.wall_times.at_most_s(job)
        return left > 0 if needed is None else needed <= left

    def _start(self, job: Job, slot: GpuSlot) -> None:
        running = RunningJob(job, slot, os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK), time.monotonic())

        def show(text: str) -> None:
            running.text = text
            if not slot.trains:
                running.begun = time.monotonic()

        self._running.append(running)
        self._write_board()
        control = RunControl(running.pipe[0], self.deadline, show)
        running.result = self._pool.submit(slot.run, job, self.source, control)
        running.result.add_done_callback(lambda _: _send_byte(self._wake[1]))

    def _take(self, running: RunningJob) -> None:
        """Record the result of an ended job, and close its pipe. If the slot raised an error, stop the sweep."""
        self._running.remove(running)
        for pipe in running.pipe:
            os.close(pipe)
        try:
            summary, job = running.result.result().summary, running.job
            self.plan.ended(job)
            wall = rundir.read_json(job.run.state).get("wall_s")
            if summary.state == "interrupted" and self.deadline is not None and time.monotonic() >= self.deadline:
                self._stop("time budget")
            self.view.event(status.ended(job.what, summary, wall))
            self._write()
        except FtbenchError as error:
            self._fail(error)

    def _stop(self, why: str) -> None:
        """Stop starting jobs. After a signal or an error, also end the running jobs."""
        self._stopping = self._stopping or why
        if why != "time budget":
            self._end_runs()

    def _end_runs(self) -> None:
        for running in self._running:
            _send_byte(running.pipe[1])

    def _fail(self, error: FtbenchError) -> None:
        self._error = self._error or error
        self._stop("error")

    def _write(self, last: bool = False) -> None:
        """Write sweep.json. If enough time has passed, also write the tables. Stop the sweep if the disk is full."""
        self._write_board()
        begin = time.monotonic()
        if last or begin >= self._tables_due:
            try:
                self.tables.write()
            except FtbenchError as error:
                self._fail(error)
            self._tables_due = time.monotonic() + _SPACING * (time.monotonic() - begin)

    def _write_board(self) -> None:
        """Write sweep.json with the status of all jobs."""
        board: dict[str, Any] = {
            "schema": SCHEMA,
            "at": rundir.now(),
            "ends_at": None if (left := self.left_s()) is None else time.time() + left,
            "running": [running.job.run.run_id for running in self._running],
            "jobs": [
                {"run": job.run.run_id, "what": job.what, "state": current.state, "reason": current.reason,
                 "wall_s": current.wall_s}
                for job, current in self.plan.statuses.items()
            ],
        }  # fmt: skip
        if isinstance(self.plan, Search):
            board["frontier"] = self.plan.as_dicts()
        try:
            rundir.write_json(self.plan.options.folder / BOARD, board, indent=None)
        except FtbenchError as error:
            self._fail(error)

    def left_s(self) -> float | None:
        """Return a rough estimate of the remaining time in seconds. Return None before the first run has ended."""
        now = time.monotonic()
        running = [(each.job, now - each.begun) for each in self._running if each.slot.trains]
        queued = [each.job for each in self._running if not each.slot.trains]
        slots = max(1, sum(slot.trains for slot in self.slots))
        return self.plan.wall_times.remaining_s([*self.plan.pending(), *queued], slots, running)

    def _show(self) -> None:
        now = time.monotonic()
        lines = [
            f"{each.slot.name}: " * (len(self.slots) > 1)
            + f"{each.job.what}: {each.text} · {seconds(now - each.begun)} so far"
            for each in self._running
        ]
        self.view.show([*lines, status.counted(self.plan.statuses.values(), self.left_s())])


def _send_byte(pipe: int) -> None:
    with suppress(OSError):  # the pipe is full or closed: the message has arrived
        os.write(pipe, b"!")
