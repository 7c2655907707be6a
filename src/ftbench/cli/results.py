"""Commands on what was trained: report, bundle, verify, import."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ftbench.cli.shared import Json, Out, Prices, app, deliver


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="run directories, or folders that hold some")],
    format: Annotated[
        str | None, typer.Option("--format", help="table, md, csv, json, latex or html; else as the file is named")
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
    references: Annotated[bool, typer.Option("--references", help="published figures beside the runs")] = False,
    estimates: Annotated[
        bool, typer.Option("--estimates", help="also what `ftbench estimate` says of the runs")
    ] = False,
) -> None:
    """Compare runs, also from other machines: one table, or `--compare gpu|method|batch|optimization|recipe|KEY`."""
    from ftbench.report import command
    from ftbench.report.render import formats

    found = command.report(command.Request(
        paths, format or formats.format_of(output), compare, baseline, strict, repeats, answers, hours, against,
        fail_above, prices, references, estimates,
    ))  # fmt: skip
    deliver(found.text, output)
    raise typer.Exit(1 if found.regressed else 0)


@app.command()
def bundle(
    paths: Annotated[list[Path], typer.Argument(help="run directories, or folders that hold some")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the archive to write: x.tar.zst")],
    with_logs: Annotated[bool, typer.Option("--with-logs", help="also what the libraries printed")] = False,
) -> None:
    """Pack runs into one file that others can report and verify; weights, adapters and secrets stay here."""
    from ftbench.store.bundle import pack as bundles

    made = bundles.make(paths, output, with_logs)
    for path in made.left_out:
        print(f"left out, still running: {path}", file=sys.stderr)
    redacted = f", {made.redacted} secrets redacted" if made.redacted else ""
    print(f"{output}: {made.runs} runs, {made.files} files{redacted}")


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="an archive of `ftbench bundle`")], as_json: Json = False
) -> None:
    """Check every hash of a bundle, and recompute every figure of its summaries from the steps."""
    from ftbench.store.bundle.verify import as_text
    from ftbench.store.bundle.verify import verify as check

    found = check(bundle)
    print(json.dumps(dataclasses.asdict(found), ensure_ascii=False) if as_json else as_text(found, bundle))
    raise typer.Exit(1 if found.problems else 0)


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
    print(import_run(file, about, out).path)
