"""`ftbench bundle`, `ftbench verify` and `ftbench import`: runs that go to others, and those of others."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Json, Out, Runs, app, emit, tell
from ftbench.core import units


@app.command()
def bundle(
    paths: Runs,
    output: Annotated[Path, typer.Option("-o", "--output", help="the archive to write: x.tar.zst")],
    with_logs: Annotated[bool, typer.Option("--with-logs", help="also what the libraries printed")] = False,
) -> None:
    """Pack runs into one file that others can report and verify. Weights, adapters and secrets stay here."""
    from ftbench.store.bundle import pack

    made = pack.make(paths, output, with_logs)
    for path in made.left_out:
        tell(f"left out, still running: {path}")
    redacted = f", {made.redacted} secrets redacted" if made.redacted else ""
    emit(f"{output}: {units.some(made.runs, 'run')}, {units.some(made.files, 'file')}{redacted}")


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="an archive of `ftbench bundle`")], as_json: Json = False
) -> None:
    """Check a bundle's hashes, and recompute its figures. Those of the summaries from the steps; 1 for what differs or
    could not be checked."""
    from ftbench.store.bundle import verify as command

    checked = command.verify(bundle)
    document = dataclasses.asdict(checked)
    emit(document if as_json else command.as_text(checked, bundle))
    raise typer.Exit(1 if checked.problems or checked.unchecked else 0)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="a trainer_state.json, a log of another tool, or the study's CSV")],
    name: Annotated[str, typer.Option(help="of the experiment: the folder below --out")],
    model: Annotated[str, typer.Option(help="what was trained: Qwen/Qwen3-8B")],
    method: Annotated[str, typer.Option(help="one of `ftbench list methods`")],
    gpu: Annotated[str, typer.Option(help="as the driver names it: NVIDIA H200; or cpu")],
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="samples a forward pass, if the file does not say")
    ] = None,
    accumulation: Annotated[
        int,
        typer.Option("--gradient-accumulation-steps", min=1, max=10**6, help="forward passes an optimizer step"),
    ] = 1,
    dataset: Annotated[str | None, typer.Option(help="what it was trained on")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, max=10**15, help="of the data set: the last step of an epoch is short")
    ] = None,
    out: Out = Path("results"),
) -> None:
    """Make a run of a log that ftbench did not write. What the log does not say stays empty."""
    from ftbench.store.importers import About, import_run

    about = About(name, model, method, None if gpu == "cpu" else gpu, batch_size, accumulation, dataset, samples)
    emit(str(import_run(file, about, out).path))
