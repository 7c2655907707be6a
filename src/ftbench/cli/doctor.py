"""`ftbench doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Json, Out, Sets, app, emit
from ftbench.errors import MissingError


@app.command()
def doctor(
    spec: Annotated[Path | None, typer.Argument(help="a spec that is to run here")] = None,
    sets: Sets = None,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Say what is installed, what works on this machine, and what to do about the rest."""
    from ftbench.doctor.examine import examine

    diagnosis = examine(spec, sets or [], out)
    emit(diagnosis.as_dict() if as_json else diagnosis.as_text())
    raise typer.Exit(MissingError.exit_code if diagnosis.can_run is False else 0)
