"""Run commands and their runs in processes that are forked from a server with all modules imported, to save time."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ftbench.launch import process_tree

PRELOADED = ["tests.preload"]
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(PRELOADED)
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
RUNS = ("ftbench.worker", "ftbench.launch.mock", "ftbench.launch.ranks")


class ForkingPopen(subprocess.Popen):
    """Fork supervised runs of ftbench and their ranks instead of executing a new interpreter."""

    def _execute_child(self, args: Sequence[str], *options: Any) -> None:
        supervised = [Path(each).name for each in args[3:4]] == ["process_tree.py"]
        command = list(args)[4 if supervised else 0 :]
        if command[:1] != [sys.executable] or not {*command[3:4]} & {*RUNS}:
            super()._execute_child(args, *options)
            return
        _, prepare, _, kept, cwd, env, _, _, _, read_in, _, _, write_out, _, write_err, *_, new_session, _ = options
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0 and supervised:
            files = {0: read_in, 1: write_out, 2: write_err}
            _leave(lambda: _supervise(command, env, cwd, files, new_session))
        elif self.pid == 0:
            if prepare:
                prepare()
            _leave(lambda: _become_rank(command, env, kept))


def _leave(function: Callable[[], object]) -> None:
    """Call the function and end this process."""
    code = 1
    try:
        function()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - like the interpreter
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _supervise(
    command: list[str], env: Mapping[str, str], cwd: str | None, files: dict[int, int], new_session: bool
) -> None:
    """Become the supervisor of a run."""
    if new_session:
        os.setsid()
    for number, file in files.items():
        if file not in (-1, number):
            os.dup2(file, number)
    os.chdir(cwd or ".")
    _enter(env, command)
    _forget_parent()
    os.execvp = lambda _, command: _become(list(command))
    process_tree.main(command)


def _become_rank(command: list[str], env: Mapping[str, str], kept: Iterable[int]) -> None:
    """Become a rank that inherits the descriptors in `kept`."""
    _enter(env, command)
    _become(command, kept)


def _become(command: list[str], kept: Iterable[int] = ()) -> None:
    """Become the process of `python -P -m MODULE ARGUMENTS`."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _forget_parent(kept)
    sys.argv = command[3:]
    _leave(lambda: runpy.run_module(command[3], run_name="__main__", alter_sys=True))


def _forget_parent(kept: Iterable[int] = ()) -> None:
    """Drop files, locks, pipes and signal handlers, as execve does."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            os.dup2(nothing, int(name))
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _enter(env: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Set environment, arguments and streams as in a new process."""
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [*arguments]
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115


def _begin() -> None:
    """Fork the runs that this process starts. multiprocessing uses its default start method."""
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    multiprocessing.set_start_method(None, force=True)
    gc.freeze()


def _command(
    arguments: list[str], env: dict[str, str], cwd: str, output: Path, errors: Path, before: Callable[[], None] | None
) -> None:
    for path, number in ((output, 1), (errors, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    _enter(env, ["ftbench", *arguments])
    _begin()
    if before:
        before()
    from ftbench import cli

    try:
        cli.main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not call them


class Warm:
    """One command, with the interface of `subprocess.Popen`. `before` is called first; its changes are inherited."""

    def __init__(
        self, arguments: list[str], env: dict[str, str], cwd: Path | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        command = (arguments, env, str(cwd or os.getcwd()), *self._files, before)
        self._process = _SERVER.Process(target=_command, args=command)
        self._printed: tuple[str, ...] | None = None
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
        if self._printed is None:
            self._printed = tuple(file.read_text(errors="replace") if file.exists() else "" for file in self._files)
            self._folder.cleanup()
        return self._printed


def run(arguments: Iterable[object], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its output."""
    process = Warm([str(argument) for argument in arguments], env)
    output, errors = process.communicate(300)
    return subprocess.CompletedProcess("ftbench", process.returncode, output, errors)


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    _begin()
    try:
        pipe.send((True, function(*arguments)))
    except Exception as error:  # noqa: BLE001 - raised again by `returned`
        pipe.send((False, error))


def returned(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a separate process. Return its result or raise its error."""
    reader, writer = _SERVER.Pipe(duplex=False)
    process = _SERVER.Process(target=_answer, args=(writer, function, arguments))
    process.start()
    writer.close()
    try:
        well, value = reader.recv()
    finally:
        process.join()
        reader.close()
    if not well:
        raise value
    return value


def _each(function: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
    return [function(*arguments) for arguments in calls]


def each(function: Callable[..., Any], calls: Sequence[Sequence[Any]]) -> list[Any]:
    """Call a function with each of the arguments in one separate process. Return the results."""
    return returned(_each, function, calls)


def _script(name: str, arguments: tuple[str, ...]) -> str:
    """Run a script and return its output. Raise RuntimeError if it fails."""
    sys.argv, printed = [name, *arguments], io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{name} ended with {end.code}") from end
    return printed.getvalue()


def script(name: str, *arguments: object) -> str:
    """Run `scripts/NAME ARGUMENTS` in a separate process and return its output."""
    return returned(_script, name, tuple(map(str, arguments)))
