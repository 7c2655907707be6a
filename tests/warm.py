"""The command in a process of its own that has its modules already: forked from a server that imported them once."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["ftbench.cli", "ftbench.sweep.command", "ftbench.sweep.execute.loop", "ftbench.report.command"]
)


def _command(arguments: list[str], env: dict[str, str], output: Path, errors: Path) -> None:
    for path, number in ((output, 1), (errors, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["ftbench", *arguments]
    from ftbench import cli

    try:
        cli.main()
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing leaves out


class Warm:
    """One command, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        self._process = _SERVER.Process(target=_command, args=(arguments, env, *self._files))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("ftbench", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        output, errors = (file.read_text(errors="replace") if file.exists() else "" for file in self._files)
        return output, errors


def run(arguments: Iterable[object], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Return what a command has printed when it has ended."""
    process = Warm([str(argument) for argument in arguments], env)
    output, errors = process.communicate(120)
    return subprocess.CompletedProcess("ftbench", process.returncode, output, errors)
