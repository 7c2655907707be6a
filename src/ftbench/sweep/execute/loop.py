"""The sweep itself: keeps every place busy, writes the table after every run, and stops when it is asked to.

Each run is watched by a thread of its own that waits for the child and does next to nothing else; only this module's
loop, in the main thread, decides, writes the journal and the table. The child dies with the thread that started it
(PR_SET_PDEATHSIG), so the thread lives as long as the child does.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench.errors import INTERRUPTED, FtbenchError
from ftbench.launch import process, runner
from ftbench.launch.runner import Result
from ftbench.store import rundir
from ftbench.sweep.execute.journal import Journal
from ftbench.sweep.execute.places import Place, Watch
from ftbench.sweep.jobs import FAILED, Job
from ftbench.sweep.output import view
from ftbench.sweep.output.table import TERMINAL_ROWS, Tables
from ftbench.sweep.plan.grid import Plan
from ftbench.sweep.plan.search import Search

BOARD = "sweep.json"
SCHEMA = 1
_TICK_S = 0.5
_FEW = 1000  # jobs whose tables are written in no time
_SPACING = 20


@dataclass(slots=True)
class Running:
    """A job in a place: the thread that watches it, the pipe that ends it, and what its files said last."""

    job: Job
    place: Place
    thread: threading.Thread
    pipe: int
    begun: float
    text: str = "starting"


@dataclass(slots=True)
class Sweep:
    """One sitting of a sweep over `places`. `source` is the text of the spec file, `deadline` (monotonic clock, s) when
    the time budget ends."""

    folder: Path
    source: bytes
    plan: Plan
    places: Sequence[Place]
    tables: Tables
    journal: Journal
    shown: view.View
    deadline: float | None = None
    about: dict[str, Any] = field(default_factory=dict)
    _running: list[Running] = field(default_factory=list)
    _inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    _stopping: str | None = None
    _error: FtbenchError | None = None
    _ring: tuple[int, int] = (-1, -1)
    _stale: bool = False
    _written_at: float = 0.0
    _write_s: float = 0.0

    def run(self) -> int:
        """Until nothing is left to start, or a signal. Returns the exit code: 0, 1 where a run failed, 130 where a
        signal ended it. Raises MissingError where the disk or the machine has no room for more."""
        self._ring = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.journal.write("begin", **self.about)
        try:
            with process.signals() as asked:
                self._loop(asked)
        finally:
            for one in self._running:
                _byte(one.pipe)
            for one in self._running:
                one.thread.join()
            os.close(self._ring[0])
            os.close(self._ring[1])
        self._note("end")
        if self._error is not None:
            raise self._error
        if self._stopping == "signal":
            return INTERRUPTED
        return int(any(found.state in FAILED for found in self.plan.standings.values()))

    def _loop(self, asked: int) -> None:
        for job, found in self.plan.standings.items():
            if found.done and found.state != "skipped":
                runner.tidy(job.run)
        self._note_board()
        while True:
            self._fill()
            if not self._running:
                return
            ready, _, _ = select.select([asked, self._ring[0]], [], [], _TICK_S)
            if asked in ready:
                os.read(asked, 1)
                self._stop("signal")
            if self._ring[0] in ready:
                with suppress(BlockingIOError):
                    os.read(self._ring[0], 4096)
            while not self._inbox.empty():
                self._take(self._inbox.get())
            self._show()

    def _fill(self) -> None:
        """Starts a job in every free place for which there is one."""
        busy = [one.place for one in self._running]
        for place in self.places:
            if self._stopping or place in busy:
                continue
            if (job := self.plan.next(self._has_time)) is None:
                return
            self._start(job, place)

    def _has_time(self, job: Job) -> bool:
        if self.deadline is None:
            return True
        left = self.deadline - time.monotonic()
        needed = self.plan.history.at_most_s(job)
        return left > 0 if needed is None else needed <= left

    def _start(self, job: Job, place: Place) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        one = Running(job, place, threading.Thread(), writer, time.monotonic())

        def say(text: str) -> None:
            self._inbox.put(text)
            _byte(self._ring[1])

        def show(text: str) -> None:
            one.text = text

        def work() -> None:
            result: Result | BaseException
            try:
                result = place.run(job, self.source, Watch(reader, self.deadline, say, show))
            except BaseException as error:  # noqa: BLE001 - the loop decides what it means
                result = error
            self._inbox.put((one, result))
            os.close(reader)
            _byte(self._ring[1])

        one.thread = threading.Thread(target=work, name=job.run.run_id)
        self._running.append(one)
        self.journal.write("start", run=job.run.run_id, what=job.what, place=place.name)
        if self._is_due():
            self._note_board()
        one.thread.start()

    def _take(self, message: Any) -> None:
        """Something a thread said: an event for people, or how its run ended."""
        if isinstance(message, str):
            self.journal.write("note", text=message)
            self.shown.event(message)
            return
        one, result = message
        one.thread.join()
        os.close(one.pipe)
        self._running.remove(one)
        if isinstance(result, FtbenchError):
            self._error = self._error or result
            self._stop("error")
            return
        if isinstance(result, BaseException):
            self._stop("error")
            raise result
        self.plan.ended(one.job)
        self.tables.forget(one.job)
        wall = rundir.read_json(one.job.run.state).get("wall_s")
        if result.summary.state == "interrupted" and self._stopping is None and self.deadline is not None:
            self._stop("time budget")
        self.shown.event(view.ended(one.job.what, result.summary, wall))
        told = {"state": result.summary.state, "reason": result.summary.reason, "wall_s": wall}
        self._note("ended", run=one.job.run.run_id, **told)

    def _stop(self, why: str) -> None:
        """Starts nothing more. A signal, and an error, end the runs that are on."""
        self._stopping = self._stopping or why
        if why != "time budget":
            for one in self._running:
                _byte(one.pipe)

    def _note(self, event: str, **more: Any) -> None:
        """The journal, the tables and the board after something has happened. A disk that takes no more stops the
        sweep; what has ended is in its own directory."""
        try:
            self.journal.write(event, **more)
            self._write(last=event == "end")
        except FtbenchError as error:
            self._error = self._error or error
            self._stop("error")

    def _write(self, last: bool) -> None:
        """The tables and the board. With thousands of runs they take seconds: then not after each run, but in no more
        than a twentieth of the time; always at the end, unless nothing has changed."""
        self._stale = self._stale or not last
        if not self._stale and self.tables.written and len(self.plan.standings) > TERMINAL_ROWS:
            return
        begin = time.monotonic()
        if last or self._is_due():
            self.tables.write()
            self._note_board()
            self._write_s, self._stale = time.monotonic() - begin, False

    def _is_due(self) -> bool:
        return len(self.plan.standings) <= _FEW or time.monotonic() - self._written_at > _SPACING * self._write_s

    def _note_board(self) -> None:
        """sweep.json: where every job stands, for another shell."""
        begin = time.monotonic()
        jobs: list[dict[str, Any]] = [
            {"run": job.run.run_id, "what": job.what}
            | {"state": found.state, "reason": found.reason, "wall_s": found.wall_s}
            for job, found in self.plan.standings.items()
        ]
        board = {
            "schema": SCHEMA,
            **self.about,
            "at": rundir.now(),
            "left_s": self.left_s(),
            "running": [one.job.run.run_id for one in self._running],
            "jobs": jobs,
        }
        if isinstance(self.plan, Search):
            board["frontier"] = self.plan.as_dicts()
        try:
            rundir.write_json(self.folder / BOARD, board, indent=None)
        except FtbenchError as error:
            self._error = self._error or error
            self._stop("error")
        self._written_at = time.monotonic()
        self._write_s = max(self._write_s, self._written_at - begin)

    def left_s(self) -> float | None:
        pending = [*self.plan.pending(), *(one.job for one in self._running)]
        return self.plan.history.remaining_s(pending, max(1, len(self.places)))

    def _show(self) -> None:
        now = time.monotonic()
        running = [f"{one.place.name}: {one.job.what}: {one.text} · {now - one.begun:.0f} s" for one in self._running]
        self.shown.show(view.counted(self.plan.standings.values(), self.left_s()), running)


def _byte(pipe: int) -> None:
    with suppress(OSError):  # full, or closed already: either way it was heard
        os.write(pipe, b"!")
