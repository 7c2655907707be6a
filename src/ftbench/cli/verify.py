"""`ftbench verify`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Json, app, emit


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="an archive of `ftbench bundle`")], as_json: Json = False
) -> None:
    """Check every hash of a bundle, and recompute every figure of its summaries from the steps; 1 for what differs or
    could not be checked."""
    from ftbench.store.bundle import verify as command

    checked = command.verify(bundle)
    document = dataclasses.asdict(checked)
    emit(document if as_json else command.as_text(checked, bundle))
    raise typer.Exit(1 if checked.problems or checked.unchecked else 0)
