"""The command line. Each command parses its arguments, calls one function, and prints the result.

Results are printed to stdout, progress to stderr.
"""

import atexit
import errno
import gc
import importlib
import io
import os
import sys
from typing import Annotated

import typer

from ftbench import __version__
from ftbench.cli.shared import app, check_arguments, emit, log
from ftbench.errors import FtbenchError, MissingError

MODULES = ("train", "plans", "report", "estimate", "machine")  # --help lists them in this order
atexit.register(gc.freeze)  # saves the garbage collection at exit: 0.1 s of 0.5 s in `report`
for _name in MODULES:
    importlib.import_module(f"ftbench.cli.{_name}")  # registers its commands with `app`


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        emit(f"ftbench {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command `ftbench`. Print errors without a traceback, and exit with the exit code of the error."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - the shell closed it
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 cannot show every character
    try:
        app(args=check_arguments(sys.argv[1:]))
    except FtbenchError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        _fail(f"{os.fsdecode(error.filename or 'the output')}: {error.strerror}", MissingError.exit_code)


def _fail(text: str, code: int) -> None:
    for line in text.splitlines():
        log(f"ftbench: {line}")
    sys.exit(code)
