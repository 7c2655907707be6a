"""The commands: parse, one call, print, exit code. stdout carries the result, stderr the story."""

import copy
import errno
import gc
import importlib
import io
import os
import platform
import signal
import sys
import threading
from typing import Annotated

import typer
from typer.models import CommandInfo

from ftbench import __version__
from ftbench.cli.shared import app, emit, guard, tell
from ftbench.core.units import some
from ftbench.errors import INTERRUPTED, UNREAD, FtbenchError, MissingError, SpecError, file_problem

MODULES = ("train", "plans", "report", "exchange", "estimate", "machine")  # in the order of --help
_MOST_LINES = 20  # of an error
for _name in MODULES:
    importlib.import_module(f"ftbench.cli.{_name}")  # each registers its commands with `app`


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="--version: as one JSON document")] = False,
) -> None:
    if version and as_json:
        from ftbench.core.rows import SCHEMA
        from ftbench.store.machine import commit

        emit({"ftbench": __version__, "commit": commit(), "python": platform.python_version(), "schema": SCHEMA})
    elif version:
        print(f"ftbench {__version__}")
    elif as_json:
        raise SpecError("--json: stands behind a command, or beside --version")
    if version:
        raise typer.Exit


def main() -> None:
    """Run the console command: turn errors meant for the user into sentences, and end with the exit code of their
    kind."""
    gc.set_threshold(200_000)  # what is imported is no garbage, and was looked through for a tenth of a command's time
    _prepare_streams()
    try:
        _command()
    except SystemExit as ending:
        if ending.code == INTERRUPTED and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a further Ctrl-C finds nothing that would need a traceback
        raise
    finally:
        gc.freeze()  # nor is it looked through again at the end, which took as long once more


def _command() -> None:
    stdout = sys.stdout
    try:
        try:
            asked_for()(standalone_mode=True)
        finally:
            unread = sys.stdout is not stdout  # typer puts another in its place where nobody reads it
            stdout.flush()
            if unread:
                raise BrokenPipeError
    except FtbenchError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _to_nowhere(stdout.fileno())
        sys.exit(UNREAD)
    except OSError as error:
        _fail_for_file(error)


def asked_for() -> typer.Typer:
    """Return the application with the one command that the first argument names, or with all where it names none:
    reading the options of every command takes longer than many a command."""
    named = [each for each in app.registered_commands if _called(each) in sys.argv[1:2]]
    result = copy.copy(app)
    result.registered_commands = named or app.registered_commands
    return result


def _called(command: CommandInfo) -> str | None:
    return command.name or (command.callback and command.callback.__name__)


def _prepare_streams() -> None:
    """Open streams that are closed on nothing, before a file takes their number; let an ASCII terminal show the rest,
    no secret out, and no command end for a stderr that is full."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _to_nowhere(number, os.O_RDONLY if name == "stdout" else os.O_RDWR)  # to write there is an error
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        guard(stream)
    write = sys.stderr.write

    def attempt(text: str) -> int:
        try:
            return write(text)
        except OSError:
            _to_nowhere(sys.stderr.fileno())
            return len(text)

    sys.stderr.write = attempt  # type: ignore[method-assign]


def _to_nowhere(number: int, flags: int = os.O_RDWR) -> None:
    os.dup2(os.open(os.devnull, flags), number)


def _fail_for_file(error: OSError) -> None:
    """Say which file it was; what names none, and is neither a full disk nor a folder that is gone, is an error of
    ours."""
    if error.filename is not None:
        code = SpecError.exit_code if error.errno == errno.ENAMETOOLONG else MissingError.exit_code
        _fail(f"{os.fsdecode(error.filename)}: {file_problem(error, '{}')}", code)
    if error.errno == errno.ENOENT:  # os.getcwd, which relative paths need
        _fail("the folder that this command was started in is gone: go to another", MissingError.exit_code)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF):
        raise error
    _to_nowhere(sys.stdout.fileno())  # what is left of it is not tried again
    reason = "it is closed" if error.errno == errno.EBADF else error.strerror
    _fail(f"stdout: {reason}: the result is not whole", MissingError.exit_code)


def _fail(text: str, code: int) -> None:
    lines = text.splitlines()
    if (more := len(lines) - _MOST_LINES) > 0:
        lines[_MOST_LINES:] = [f"… and {some(more, 'more line')}"]
    for line in lines:
        tell(f"ftbench: {line}")
    sys.exit(code)
