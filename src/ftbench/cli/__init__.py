"""The commands, a file each: parse, one call, print, exit code. stdout carries the result, stderr the story."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from ftbench import __version__
from ftbench.cli.shared import app
from ftbench.errors import INTERRUPTED, FtbenchError

COMMANDS = (  # in the order of --help
    "run", "profile", "sweep", "ablate", "parity", "report", "bundle", "verify", "import_", "estimate", "recommend",
    "probe", "doctor", "list_",
)  # fmt: skip
for _name in COMMANDS:
    importlib.import_module(f"ftbench.cli.{_name}")  # each registers its command with `app`


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        print(f"ftbench {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the console command: turn errors meant for the user into sentences, and end with the exit code of their
    kind."""
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
