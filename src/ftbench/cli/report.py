"""`ftbench report` and `ftbench show`: compare runs, and show one run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ftbench.cli.shared import (
    ADVANCED,
    OUTPUT,
    Json,
    Output,
    Overwrite,
    Runs,
    Wide,
    app,
    check_output,
    emit,
    write_result,
)


def _of(panel: str, *names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **options)


@app.command()
def report(
    paths: Runs,
    answers: Annotated[
        bool, typer.Option("--answers", help="add first steps, losses, other groups, samples per night")
    ] = False,
    compare: Annotated[str | None, typer.Option(help="compare runs along this axis", metavar="AXIS")] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="only matching runs: method=lora, rank=8,16", metavar="KEY=VALUE")
    ] = None,
    sort: Annotated[str | None, typer.Option(help="best first: tokens/s; -tokens/s reverses", metavar="COLUMN")] = None,
    prices: Annotated[Path | None, typer.Option(help="prices of GPUs: adds energy and money", metavar="FILE")] = None,
    output: Output = None,
    force: Overwrite = False,
    format: Annotated[
        str | None, _of(OUTPUT, "--format", help="table, md, csv, json or html; by default from the suffix of -o")
    ] = None,
    wide: Wide = False,
    baseline: Annotated[str | None, _of(ADVANCED, help="--compare: baseline value of the axis")] = None,
    rows: Annotated[str, _of(ADVANCED, help="each run, or merge: one row per spec and GPU")] = "each",
    hours: Annotated[float | None, _of(ADVANCED, help="--answers, --prices: hours of a night (8)")] = None,
    against: Annotated[Path | None, _of(ADVANCED, help="earlier runs; exit code 1 on a regression")] = None,
    fail_above: Annotated[str | None, _of(ADVANCED, help="--against: allowed regression (5%)")] = None,
) -> None:
    """Compare runs, also from other machines, in one table. Or `--compare gpu|method|batch|optimization|recipe|KEY`."""
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


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="folder, id or a part of it, or number in `report`")],
    paths: Annotated[list[Path] | None, typer.Argument(help="folders of the runs (results)")] = None,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Show one run again: its figures, what limits its speed, what to try."""
    from ftbench.report.show import show as shown

    answer = shown(run, paths or [Path("results")])
    emit(answer.document() if as_json else answer.text())
