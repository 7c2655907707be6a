"""Slurm's commands: submit, look at and cancel the jobs of a sweep.

`.slurm/<run>/` in the experiment's folder holds a job's script, order and log, and the run until it has ended.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core.processes import run_program
from ftbench.errors import MissingError, SpecError
from ftbench.spec.slurm import SlurmSettings
from ftbench.store import rundir
from ftbench.sweep.output.live import UNFINISHED

ORDER, OUTCOME, SCRIPT, LOG = "order.json", "outcome.json", "job.sh", "log.txt"
ANSWER_S = 60.0  # longest wait for a Slurm command
AWAY_S = 1800.0  # longest time without an answer of the controller
_RETRY_S = 30.0
_POLL_S = 5.0
# Errors of Slurm's commands while the controller is not reachable.
_AWAY = ("Unable to contact slurm controller", "Socket timed out", "does not answer")
# States of squeue(1) and sacct(1) in which a job has not ended.
_ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD",
          "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT"}  # fmt: skip
# Reasons of squeue(1) for which a pending job never starts by itself.
_BLOCKED = {"PartitionTimeLimit", "PartitionNodeLimit", "PartitionDown", "PartitionInactive", "BadConstraints",
            "InvalidAccount", "InvalidQOS", "JobHeldAdmin", "JobHeldUser", "DependencyNeverSatisfied"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobStatus:
    """State, reason and node of a job in Slurm's words."""

    state: str
    reason: str
    node: str

    @property
    def alive(self) -> bool:
        return self.state in _ALIVE

    @property
    def blocked(self) -> bool:
        held = "held" in self.reason or self.state in ("REQUEUE_HOLD", "SPECIAL_EXIT")
        return held or (self.state == "PENDING" and self.reason in _BLOCKED)

    @property
    def text(self) -> str:
        return f"on {self.node}" if self.state == "RUNNING" else f"waiting in Slurm's queue ({self.reason})"


def command(*arguments: str) -> str:
    """Return the output of a Slurm command. Raise OSError if it fails or takes longer than ANSWER_S seconds."""
    try:
        done = run_program(arguments, ANSWER_S)
    except TimeoutError:
        raise OSError(f"{arguments[0]} does not answer within {ANSWER_S:.0f} s") from None
    if done.returncode:
        lines = [line.removeprefix(f"{arguments[0]}: error: ").strip() for line in done.stderr.splitlines()]
        raise OSError("; ".join(filter(None, lines))[:300] or f"{arguments[0]} failed")
    return done.stdout


def _sleep(wait_s: float) -> bool:
    time.sleep(wait_s)
    return False


class Queue:
    """The jobs of one sweep. Its threads share one look at Slurm's queue every few seconds."""

    def __init__(self, settings: SlurmSettings, folder: Path) -> None:
        """Raise MissingError if Slurm does not answer."""
        self.settings, self.folder = settings, folder.resolve()
        self._lock = threading.Lock()
        self._jobs: dict[str, tuple[str, JobStatus]] = {}  # by job name: id and status
        self._looked = self._answered = time.monotonic()
        try:
            self._look()
        except OSError as error:
            raise MissingError(f"--on slurm: {error}: start the sweep where `sbatch` and `squeue` work") from None
        self.earlier = {name for name, (_, status) in self._jobs.items() if status.alive}  # of earlier sessions

    def name(self, run_id: str) -> str:
        """Return the name of a run's job, which is unique for the folder."""
        return f"ftbench-{hashlib.sha256(str(self.folder / run_id).encode()).hexdigest()[:16]}"

    def _look(self) -> None:
        """Read the state of all jobs of this user, including jobs that ended a moment ago."""
        lines = command("squeue", "--me", "-h", "-t", "all", "-o", "%j|%A|%T|%r|%N").splitlines()
        rows = [row for line in lines if len(row := line.strip().split("|")) == 5 and row[1].isdecimal()]
        rows.sort(key=lambda row: int(row[1]))  # of several jobs with one name, the last one counts
        self._jobs = {name: (job, JobStatus(*status)) for name, job, *status in rows}
        self._answered = time.monotonic()

    def status(self, run_id: str) -> tuple[str, JobStatus] | None:
        """Return id and status of a run's job; None if Slurm does not list it.

        If the controller does not answer, the last status remains. Raise MissingError after AWAY_S seconds.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._looked >= _POLL_S:
                self._looked = now
                try:
                    self._look()
                except OSError as error:
                    if now - self._answered > AWAY_S:
                        raise MissingError(f"--on slurm: {error}; the jobs continue, start the sweep again") from None
            return self._jobs.get(self.name(run_id))

    def final_state(self, job: str) -> str:
        """Return the state of a job that has left the queue, from Slurm's accounting if it is enabled."""
        try:
            return (command("sacct", "-n", "-X", "-P", "-j", job, "-o", "State").split() or ["UNKNOWN"])[0]
        except OSError:
            return "UNKNOWN"

    def submit(self, run_id: str, order: dict[str, Any], stops_within: Callable[[float], bool] = _sleep) -> str:
        """Submit a job and return its id. Retry while the controller is not reachable, until `stops_within` is true.

        Raise SpecError with Slurm's reason if it refuses the job.
        """
        arguments, end = self._prepare(run_id, order), time.monotonic() + AWAY_S
        while True:
            try:
                job = command(*arguments).strip().partition(";")[0]
                break
            except OSError as error:
                if not any(text in str(error) for text in _AWAY):
                    raise SpecError(f"--on slurm: sbatch refuses the job: {error}") from None
                if time.monotonic() > end or stops_within(_RETRY_S):
                    raise MissingError(f"--on slurm: {error}") from None
            if (entry := self.status(run_id)) and entry[1].alive:  # accepted, but the answer was lost
                return entry[0]
        with self._lock:
            self._jobs[self.name(run_id)] = job, JobStatus("PENDING", "submitted", "")
            self._looked = time.monotonic()
        return job

    def _prepare(self, run_id: str, order: dict[str, Any]) -> list[str]:
        """Write a job's files and return its sbatch command."""
        folder = self.folder / UNFINISHED / run_id
        given = {"partition": self.settings.partition, "time": self.settings.time, "gres": self.settings.gres}
        python = shlex.quote(self.settings.python or sys.executable)
        task = f"{python} -P -m ftbench.cluster.slurm {shlex.quote(str(folder))}"
        with rundir.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / OUTCOME).unlink(missing_ok=True)
        rundir.write_text(folder / SCRIPT, f"#!/bin/bash\n{self.settings.preamble}\nexec {task}\n")
        rundir.write_json(folder / ORDER, order)
        return [
            "sbatch", "--parsable", "--requeue", f"--job-name={self.name(run_id)}", f"--output={folder / LOG}",
            "--open-mode=append", *(f"--{name}={value}" for name, value in given.items() if value is not None),
            *self.settings.options, str(folder / SCRIPT),
        ]  # fmt: skip

    def cancel(self, job: str) -> None:
        try:
            command("scancel", job)
        except OSError:
            return

    def outcome(self, run_id: str) -> dict[str, Any]:
        """Return the error or the description that a job has written."""
        return rundir.read_json(self.folder / UNFINISHED / run_id / OUTCOME)

    def last_line(self, run_id: str) -> str:
        """Return the last line of a job's log."""
        try:
            lines = (self.folder / UNFINISHED / run_id / LOG).read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")

    def tidy(self, run_id: str) -> None:
        """Remove the files of a job whose run is finished."""
        shutil.rmtree(self.folder / UNFINISHED / run_id, ignore_errors=True)
