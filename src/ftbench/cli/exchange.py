"""`ftbench bundle`, `ftbench verify` and `ftbench import`: exchange runs with others."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import ADVANCED, Json, Out, Runs, app, emit, log
from ftbench.core import units


@app.command()
def bundle(
    paths: Runs, output: Annotated[Path, typer.Option("-o", "--output", help="the archive to write: x.tar.zst")]
) -> None:
    """Pack runs into one file that others can report and verify. Weights, adapters, logs and secrets are left out."""
    from ftbench.store.bundle import make

    made = make(paths, output)
    for path in made.left_out:
        log(f"skipped a run that is still running: {path}")
    redacted = f", {made.redacted} secrets redacted" if made.redacted else ""
    emit(f"{output}: {units.some(made.runs, 'run')}, {units.some(made.files, 'file')}{redacted}")


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="an archive of `ftbench bundle`")], as_json: Json = False
) -> None:
    """Check the hashes of a bundle and recompute its figures from the steps. Exits with 1 if anything differs."""
    from ftbench.store import verify as command

    checked = command.verify(bundle)
    document = dataclasses.asdict(checked)
    emit(document if as_json else command.as_text(checked, bundle))
    raise typer.Exit(1 if checked.problems or checked.unchecked else 0)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="trainer_state.json, or a seven-column CSV")],
    name: Annotated[str, typer.Option(help="name of the experiment: the folder below --out")],
    model: Annotated[str, typer.Option(help="the trained model: Qwen/Qwen3-8B")],
    method: Annotated[str, typer.Option(help="a method of `ftbench list methods`")],
    gpu: Annotated[str, typer.Option(help="the driver's name of the GPU: NVIDIA H200; or cpu")],
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, max=10**6, help="samples per forward pass, if the file lacks it", rich_help_panel=ADVANCED),
    ] = None,
    accumulation: Annotated[
        int,
        typer.Option(
            "--gradient-accumulation-steps",
            min=1,
            max=10**6,
            help="forward passes per optimizer step",
            rich_help_panel=ADVANCED,
        ),
    ] = 1,
    dataset: Annotated[str | None, typer.Option(help="name of the data set")] = None,
    out: Out = Path("results"),
) -> None:
    """Convert a log that ftbench did not write into a run. Fields that the log lacks stay empty."""
    from ftbench.store.importers import About, import_run

    about = About(name, model, method, None if gpu == "cpu" else gpu, batch_size, accumulation, dataset)
    emit(str(import_run(file, about, out).path))
