"""`ftbench report` and `ftbench show`: many runs side by side, and one alone."""

from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Json, Prices, Runs, Wide, app, emit, write_result


@app.command()
def report(
    paths: Runs,
    format: Annotated[
        str | None, typer.Option("--format", help="table, md, csv, json or html; else as the file is named")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write to this file instead of stdout")] = None,
    compare: Annotated[str | None, typer.Option(help="hold runs against each other along this", metavar="AXIS")] = None,
    baseline: Annotated[str | None, typer.Option(help="--compare: the value that the others are held against")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="--compare: only pairs of the same recipe")] = False,
    repeats: Annotated[str, typer.Option(help="each, or merge: one row for the runs of a spec on a GPU")] = "each",
    answers: Annotated[bool, typer.Option("--answers", help="also what a night trains, what fits, what to do")] = False,
    hours: Annotated[float | None, typer.Option(help="--answers, --prices: how long a night is (8)")] = None,
    against: Annotated[Path | None, typer.Option(help="earlier runs: exit code 1 if something is worse now")] = None,
    fail_above: Annotated[str | None, typer.Option(help="--against: how much worse is too much (5%)")] = None,
    prices: Prices = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="only runs of which this holds: method=lora, rank=8,16", metavar="KEY=VALUE"),
    ] = None,
    sort: Annotated[str | None, typer.Option(help="the best first: tokens/s; -tokens/s last", metavar="COLUMN")] = None,
    columns: Annotated[str | None, typer.Option(help="these columns alone: tokens/s,batch,rank", metavar="A,B")] = None,
    wide: Wide = False,
) -> None:
    """Compare runs, also from other machines, in one table. Or `--compare gpu|method|batch|optimization|recipe|KEY`."""
    from ftbench.core.table import show_in_full
    from ftbench.report import command
    from ftbench.report.render import formats

    show_in_full(wide or output is not None)

    request = command.Request(
        paths, formats.format_of(output) if format is None else format, compare, baseline, strict, repeats, answers,
        hours, against, fail_above, prices, where or [], sort,
        [name.strip() for name in columns.split(",")] if columns is not None else [],
    )  # fmt: skip
    answer = command.report(request)
    write_result(answer.text, output)
    raise typer.Exit(1 if answer.regressed else 0)


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="a run: its folder, its id or a part of it, its number in `report`")],
    paths: Annotated[list[Path] | None, typer.Argument(help="where the runs are (results)")] = None,
    wide: Wide = False,
    as_json: Json = False,
) -> None:
    """Print a run's card again: what it was bound by, what to try."""
    from ftbench.report.show import show as shown

    answer = shown(run, paths or [Path("results")])
    emit(answer.document() if as_json else answer.text())
