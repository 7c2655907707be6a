"""The commands: parse, one call, print, exit code. stdout carries the result, stderr the story."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ftbench import __version__
from ftbench.cli import training  # each names its commands to `app`, in the order of --help

# isort: split
from ftbench.cli import results

# isort: split
from ftbench.cli import beforehand
from ftbench.cli.shared import app
from ftbench.errors import INTERRUPTED, FtbenchError

__all__ = ["app", "beforehand", "main", "results", "training"]


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        print(f"ftbench {__version__}")
        raise typer.Exit


def main() -> None:
    """The console command: errors meant for the user become sentences, and the exit code says what kind they are."""
    try:
        app(standalone_mode=True)
    except FtbenchError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)


def _fail(text: str, code: int) -> None:
    for line in text.splitlines():
        print(f"ftbench: {line}", file=sys.stderr)
    sys.exit(code)
