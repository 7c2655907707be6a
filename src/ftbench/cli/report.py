"""`ftbench report`, `show`, `bundle`, `verify` and `import`: compare, show and exchange runs."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import typer

from ftbench.cli.shared import (
    ADVANCED,
    OUTPUT,
    Json,
    Out,
    Output,
    Overwrite,
    Runs,
    Wide,
    check_output,
    command,
    emit,
    log,
    of,
    write_result,
)
from ftbench.core import units


@command()
def report(
    paths: Runs,
    answers: Annotated[bool, typer.Option("--answers", help="add energy, samples per night, other groups")] = False,
    compare: Annotated[str | None, typer.Option(help="compare runs by this setting", metavar="AXIS")] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="only runs with these values: method=lora, rank=8,16", metavar="KEY=VALUE")
    ] = None,
    sort: Annotated[str | None, typer.Option(help="sort rows: tokens/s; reversed: -tokens/s", metavar="COLUMN")] = None,
    prices: Annotated[Path | None, typer.Option(help="prices of GPUs: adds energy and cost", metavar="FILE")] = None,
    output: Output = None,
    force: Overwrite = False,
    format: Annotated[
        Literal["table", "md", "csv", "json", "html"] | None,
        of(OUTPUT, "table, md, csv, json or html; by default from the suffix of -o", "--format"),
    ] = None,
    wide: Wide = False,
    baseline: Annotated[str | None, of(ADVANCED, "with --compare: the value to compare with: lora")] = None,
    rows: Annotated[
        Literal["auto", "each", "merge"], of(ADVANCED, "each: one row per run; merge: one row for all repeats")
    ] = "auto",
    hours: Annotated[
        float | None, of(ADVANCED, "with --answers or --prices: length of a night in hours (8)", min=0.001, max=10**6)
    ] = None,
    against: Annotated[Path | None, of(ADVANCED, "earlier runs to compare with; exit code 1 on regression")] = None,
    fail_above: Annotated[str | None, of(ADVANCED, "with --against: largest allowed regression (5%)")] = None,
) -> None:
    """Compare runs in one table. `--compare gpu|method|batch|optimization|recipe|KEY` selects the compared setting."""
    from ftbench.core.table import show_in_full
    from ftbench.report import build, formats

    show_in_full(wide or output is not None)
    check_output(output, force)

    request = build.Request(
        paths, formats.format_of(output) if format is None else format, compare, baseline, rows, answers,
        hours, against, fail_above, prices, where or [], sort,
    )  # fmt: skip
    answer = build.report(request)
    write_result(answer.text, output)
    raise typer.Exit(1 if answer.regressed else 0)


@command()
def show(
    run: Annotated[str, typer.Argument(help="the run: its number in `report`, its folder, or a part of its id")],
    paths: Annotated[list[Path] | None, typer.Argument(help="folders of the runs (default: results)")] = None,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Show the result of one run: its figures, what limits its speed, and what to try."""
    from ftbench.report.show import show as shown

    answer = shown(run, paths or [Path("results")])
    emit(answer.document() if as_json else answer.text())


@command()
def bundle(
    paths: Runs,
    output: Annotated[Path, typer.Option("-o", "--output", help="the archive to write: runs.tar.zst")],
    force: Overwrite = False,
) -> None:
    """Pack runs into one file for other people. The file has no weights, adapters or logs,
    and no secrets of known kinds."""
    from ftbench.store.bundle import make

    check_output(output, force)
    made = make(paths, output)
    for path in made.left_out:
        log(f"skipped a run that is still running: {path}")
    redacted = f", {made.redacted} secrets redacted" if made.redacted else ""
    emit(f"{output}: {units.some(made.runs, 'run')}, {units.some(made.files, 'file')}{redacted}")


@command()
def verify(bundle: Annotated[Path, typer.Argument(help="archive of `ftbench bundle`")], as_json: Json = False) -> None:
    """Check the hashes of a bundle and recompute its figures from the steps. Exits with 1 if anything differs."""
    from ftbench.store import verify as command

    checked = command.verify(bundle)
    emit(dataclasses.asdict(checked) if as_json else command.as_text(checked, bundle))
    raise typer.Exit(1 if checked.problems else 0)


@command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="trainer_state.json, or a CSV with steps and times")],
    name: Annotated[str, typer.Option(help="name of the experiment: the folder below --out")],
    model: Annotated[str, typer.Option(help="the trained model: Qwen/Qwen3-8B")],
    method: Annotated[str, typer.Option(help="a method of `ftbench list methods`")],
    gpu: Annotated[str, typer.Option(help="the GPU as nvidia-smi names it: NVIDIA H200; or cpu")],
    batch_size: Annotated[
        int | None, of(ADVANCED, "samples per forward pass, if the file does not have it", min=1, max=10**6)
    ] = None,
    accumulation: Annotated[
        int, of(ADVANCED, "forward passes per optimizer step", "--gradient-accumulation-steps", min=1, max=10**6)
    ] = 1,
    dataset: Annotated[str | None, typer.Option(help="name of the data set")] = None,
    out: Out = Path("results"),
) -> None:
    """Convert the log of another program into a run. Fields that are not in the log stay empty."""
    from ftbench.store.importers import About, import_run

    card = None if gpu and gpu.casefold() == "cpu" else gpu
    about = About(name, model, method, card, batch_size, accumulation, dataset)
    emit(str(import_run(file, about, out).path))
