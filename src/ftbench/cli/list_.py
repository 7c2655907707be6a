"""`ftbench list`."""

from __future__ import annotations

from typing import Annotated

import typer

from ftbench.cli.shared import app, emit


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, optimizations, recipes, models, datasets, gpus or keys")],
) -> None:
    """Show what can be named in a spec."""
    from ftbench.report.catalogue import catalogue

    emit(catalogue(what), end="")
