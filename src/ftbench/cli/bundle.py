"""`ftbench bundle`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Runs, app, emit, tell


@app.command()
def bundle(
    paths: Runs,
    output: Annotated[Path, typer.Option("-o", "--output", help="the archive to write: x.tar.zst")],
    with_logs: Annotated[bool, typer.Option("--with-logs", help="also what the libraries printed")] = False,
) -> None:
    """Pack runs into one file that others can report and verify; weights, adapters and secrets stay here."""
    from ftbench.store.bundle import pack

    made = pack.make(paths, output, with_logs)
    for path in made.left_out:
        tell(f"left out, still running: {path}")
    redacted = f", {made.redacted} secrets redacted" if made.redacted else ""
    emit(f"{output}: {made.runs} runs, {made.files} files{redacted}")
