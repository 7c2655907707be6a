"""Slurm's queue as a sweep needs it, by its own commands: array tasks are submitted, looked at and cancelled.

Of each submission a folder `.slurm/<token>/` beside the runs, on the disk that the nodes share, holds the script, its
tasks' orders and what they leave. A job's name has the token: a sweep that is begun again knows the tasks of the last.
"""

import json
import re
import secrets
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from ftbench.core.programs import run_program
from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.spec.slurm import SlurmSettings
from ftbench.store import rundir
from ftbench.store.rundir import RunDir

FOLDER, ORDERS, SCRIPT = ".slurm", "orders.json", "job.sh"
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")
_PREFIX = "ftbench-"
_ENTRY = re.compile(rf"{_PREFIX}(\w+)\|(\w+)\|(\d{{1,9}})\|([^|]*)\|([^|]*)\|([^|]*)")
_GATHER_S = 0.3  # what is asked for within this time becomes one array
_LOOK_S = 5.0  # between two looks at the queue, however many ask
_GONE = 2  # looks at the queue without a task after which it is gone
_MOST_HOLDS = 5  # times that Slurm holds a task back: a node that cannot start it is not the only one then
ANSWER_S = 60.0
# What Slurm's commands say where the controller is away, in words of slurm/src/common/slurm_errno.c.
_AWAY = ("Unable to contact slurm controller", "Socket timed out", "Connection refused", "Zero Bytes were transmitted",
         "Could not establish", "Slurm backup controller in standby", "Unexpected message received")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Task:
    """A task of an array. `folder` is its submission's."""

    folder: Path
    index: int
    job: str

    @property
    def name(self) -> str:
        return f"{self.job}_{self.index}"

    @property
    def outcome(self) -> dict[str, Any]:
        """Return what the task had to say beside its run; empty where it said nothing."""
        return rundir.read_json(self.folder / f"{self.index}.json")

    @property
    def last_words(self) -> str:
        """Return the last line of its log."""
        with suppress(OSError):
            lines = (self.folder / f"{self.index}.log").read_text(errors="replace").splitlines()
            return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class QueueEntry:
    """Where a task stood at one look at the queue."""

    job: str
    state: str
    reason: str
    node: str

    @property
    def text(self) -> str:
        return f"on {self.node}" if self.state == "RUNNING" else f"waits in Slurm's queue ({self.reason})"


@dataclass(slots=True)
class _Request:
    """An order on its way into an array."""

    order: dict[str, Any]
    ready: threading.Event = field(default_factory=threading.Event)
    task: Task | None = None
    error: FtbenchError | None = None


class Queue:
    """The tasks of the sweep in `folder`, for threads that each wait for one."""

    def __init__(self, settings: SlurmSettings, folder: Path) -> None:
        """Raise MissingError where Slurm's commands or its controller are not there."""
        if lacking := [name for name in COMMANDS if shutil.which(name) is None]:
            raise MissingError(
                f"--on slurm: no {', '.join(lacking)} on this machine: start the sweep where `sbatch` works"
            )
        self.settings, self.folder = settings, folder.resolve() / FOLDER
        self._gathering, self._looking = threading.Lock(), threading.Lock()
        self._requests: list[_Request] = []
        self._entries: dict[tuple[str, int], QueueEntry] = {}
        self._missed: dict[Task, int] = {}
        self._holds: dict[Task, list[QueueEntry]] = {}
        self._looked, self._looks, self._answers, self._said_away = 0.0, 0, False, False
        if not self.look(0.0):
            raise MissingError("--on slurm: the controller of Slurm does not answer (`sinfo`): try again when it does")

    def enter(self, order: dict[str, Any], source: bytes, stops_within: Callable[[float], bool]) -> Task:
        """Submit a task, in one array with those of other threads that come at the same time."""
        request = _Request(order)
        with self._gathering:
            self._requests.append(request)
            leads = len(self._requests) == 1
        if leads:
            time.sleep(_GATHER_S)
            with self._gathering:
                batch, self._requests = self._requests, []
            self._submit_all(batch, source, stops_within)
        request.ready.wait()
        if request.task is None:
            raise request.error or AssertionError("neither a task nor an error")
        return request.task

    def _submit_all(self, batch: Sequence[_Request], source: bytes, stops_within: Callable[[float], bool]) -> None:
        try:
            tasks = self.submit([each.order for each in batch], source, stops_within)
            for request, task in zip(batch, tasks, strict=True):
                request.task = task
        except FtbenchError as error:
            for request in batch:
                request.error = error
        finally:
            for request in batch:
                request.ready.set()

    def submit(
        self, orders: Sequence[dict[str, Any]], source: bytes = b"", stops_within: Callable[[float], bool] | None = None
    ) -> list[Task]:
        """Submit an array of tasks. Raise SpecError for what this Slurm refuses, MissingError where the disk does not
        take it, or `stops_within` ends the wait for a controller that is away."""
        folder = self.folder / secrets.token_hex(4)
        with rundir.writing(folder):
            folder.mkdir(parents=True)
            (folder / "spec.yaml").write_bytes(source)
        rundir.write_text(folder / SCRIPT, self._script(folder))
        rundir.write_json(folder / ORDERS, {"tasks": list(orders)}, indent=None)
        job = self._sbatch(folder, len(orders), stops_within or _sleep)
        return [Task(folder, index, job) for index in range(len(orders))]

    def _script(self, folder: Path) -> str:
        python = shlex.quote(self.settings.python or sys.executable)
        task = f"{python} -P -m ftbench.sweep.execute.slurm_task {shlex.quote(str(folder))} $SLURM_ARRAY_TASK_ID"
        return f"#!/bin/bash\n{self.settings.preamble}\nexec {task}\n"

    def _sbatch(self, folder: Path, count: int, stops_within: Callable[[float], bool]) -> str:
        """Return the job's number. Wait for a controller that is away: what it took all the same is in the queue."""
        given = {"partition": self.settings.partition, "time": self.settings.time, "gres": self.settings.gres}
        command = [
            "sbatch", "--parsable", f"--array=0-{count - 1}", f"--job-name={_PREFIX}{folder.name}", "--requeue",
            f"--output={folder}/%a.log", "--open-mode=append",
            *(f"--{name}={value}" for name, value in given.items() if value is not None), *self.settings.options,
            str(folder / SCRIPT),
        ]  # fmt: skip
        while True:
            answer = ask(command)
            if answer.returncode == 0:
                return answer.stdout.strip().partition(";")[0]
            error = answer.stderr
            if not any(words in error for words in _AWAY):
                shutil.rmtree(folder, ignore_errors=True)
                raise SpecError(f"--on slurm: sbatch refuses: {_reason(error)}{self._partitions(error)}")
            while not self.look(0.0):
                if stops_within(_LOOK_S):
                    raise MissingError("--on slurm: the controller of Slurm does not answer (`sinfo`)")
            if taken := [entry.job for (token, _), entry in self._entries.items() if token == folder.name]:
                return taken[0]

    def _partitions(self, error: str) -> str:
        if "partition" not in error:
            return ""
        names = ask(["sinfo", "-h", "-o", "%R"]).stdout.split()
        return f" (partitions here: {', '.join(sorted(set(names)))})" if names else ""

    def look(self, old_s: float = _LOOK_S) -> bool:
        """Look at the queue unless that was done in the last `old_s` seconds; return whether it answered."""
        if not self._looking.acquire(blocking=old_s == 0):
            return self._answers
        try:
            if time.monotonic() - self._looked >= old_s:
                self._answers = self._look()
                self._looked = time.monotonic()
                self._said_away = self._said_away and not self._answers
            return self._answers
        finally:
            self._looking.release()

    def _look(self) -> bool:
        answer = ask(["squeue", "--me", "-h", "-r", "-o", "%j|%F|%K|%T|%r|%N"])
        if answer.returncode:
            return False
        rows = (row.groups() for line in answer.stdout.splitlines() if (row := _ENTRY.fullmatch(line)))
        self._entries = {
            (token, int(index)): QueueEntry(job, state, reason, node) for token, job, index, state, reason, node in rows
        }
        self._looks += 1
        return True

    def is_away(self) -> bool:
        """Return, once each time, that the controller does not answer."""
        said, self._said_away = self._said_away, self._said_away or not self._answers
        return self._said_away and not said

    def is_gone(self, task: Task) -> bool:
        """Return whether a task has left the queue: the controller has answered several times without it."""
        self.look()
        if self.entry(task) is not None:
            self._missed.pop(task, None)
            return False
        return self._looks - self._missed.setdefault(task, self._looks) >= _GONE

    def entry(self, task: Task) -> QueueEntry | None:
        """Return where a task stood at the last look; None where it is not in the queue."""
        return self._entries.get((task.folder.name, task.index))

    def tasks(self) -> dict[str, Task]:
        """Return the tasks of this folder that are in the queue, by the run that each makes."""
        tasks = {}
        for (token, index), entry in self._entries.items():
            orders = rundir.read_json(self.folder / token / ORDERS).get("tasks", [])
            if index < len(orders) and "run" in orders[index]:
                tasks[orders[index]["run"]] = Task(self.folder / token, index, entry.job)
        return tasks

    def release(self, task: Task) -> str | None:
        """Let a task go if Slurm holds it back, since a node could not start it, once for each look at the queue;
        return the reason if so."""
        entry, holds = self.entry(task), self._holds.setdefault(task, [])
        if entry is None or entry in holds or entry.state != "PENDING" or "held" not in entry.reason:
            return None
        holds.append(entry)
        ask(["scontrol", "release", task.name])
        return entry.reason

    def is_refused(self, task: Task) -> bool:
        """Return whether Slurm has held a task back so often that no node will start it."""
        return len(self._holds.get(task, [])) > _MOST_HOLDS

    def cancel(self, task: Task) -> None:
        ask(["scancel", task.name])

    def tidy(self) -> None:
        """Remove what tasks have left that are in the queue no more, or whose run is there."""
        if self.look(0.0):
            runs = self.folder.parent
            busy = {task.folder.name for run, task in self.tasks().items() if not (runs / run).exists()}
            for path in self.folder.glob("*/"):
                if path.name not in busy:
                    shutil.rmtree(path, ignore_errors=True)


def running(folder: Path, name: str) -> RunDir:
    """Return a run of a sweep's folder, or where a task of Slurm's makes it just now."""
    path = folder / name
    made = () if path.exists() else sorted(folder.glob(f"{FOLDER}/*/*/{name}"), key=rundir.modified)
    return RunDir(made[-1] if made else path)


def _sleep(wait_s: float) -> bool:
    time.sleep(wait_s)
    return False


def ask(command: Sequence[str]) -> CompletedProcess[str]:
    """Return what one of Slurm's commands says; of one that does not answer, that Slurm is away."""
    try:
        return run_program(command, ANSWER_S)
    except TimeoutError:
        return CompletedProcess(command, 1, "", _AWAY[1])
    except OSError as error:
        return CompletedProcess(command, 1, "", str(error.strerror))


def _reason(error: str) -> str:
    lines = [line.removeprefix("sbatch: error: ").strip() for line in error.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines))[:300] or "without a word"


def machine_key(settings: SlurmSettings, launcher: str) -> str:
    """Return what the description of a node depends on, as text."""
    return json.dumps([settings.model_dump(mode="json", exclude={"tasks", "time"}), launcher])
