"""`ftbench import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Out, app, emit


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="a CSV with the founding study's columns, or a trainer_state.json")],
    name: Annotated[str, typer.Option(help="of the experiment: the folder below --out")],
    model: Annotated[str, typer.Option(help="what was trained: Qwen/Qwen3-8B")],
    method: Annotated[str, typer.Option(help="one of `ftbench list methods`")],
    gpu: Annotated[str, typer.Option(help="as the driver names it: NVIDIA H200; or cpu")],
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="samples a forward pass, if the file does not say")
    ] = None,
    accumulation: Annotated[
        int, typer.Option("--gradient-accumulation-steps", min=1, help="forward passes an optimizer step")
    ] = 1,
    dataset: Annotated[str | None, typer.Option(help="what it was trained on")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="of the data set: the last step of an epoch is short")
    ] = None,
    out: Out = Path("results"),
) -> None:
    """Make a run of a log that ftbench did not write; what the log does not say stays empty."""
    from ftbench.store.importers import About, import_run

    about = About(name, model, method, None if gpu == "cpu" else gpu, batch_size, accumulation, dataset, samples)
    emit(str(import_run(file, about, out).path))
