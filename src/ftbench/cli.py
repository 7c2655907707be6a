"""The commands on one page: parse, one call, print, exit code. stdout carries the result, stderr the story."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftbench import __version__
from ftbench.errors import INTERRUPTED, FtbenchError, MissingError, SpecError

if TYPE_CHECKING:
    from ftbench.launch.follow import Follower
    from ftbench.rundir import RunDir

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measures what fine-tuning a language model costs on this machine: time, memory, energy, step by step.",
)
Spec = Annotated[Path, typer.Argument(help="YAML file that says what to train and how")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="change a key: train.batch_size=8", metavar="KEY=VALUE")]
Out = Annotated[Path, typer.Option("--out", help="where runs are kept")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


@app.command()
def run(spec: Spec, sets: Sets = None, out: Out = Path("results"), as_json: Json = False) -> None:
    """Train once, record every step, print the card."""
    from ftbench import runner
    from ftbench.report.card import card
    from ftbench.summary import as_dict

    live = _Progress()
    result = runner.run(spec, sets or [], out, live.start, live.tick, live.warn)
    live.stop()
    if as_json:
        print(json.dumps({"run_dir": str(result.run.path), "state": result.summary.state,
                          "summary": as_dict(result.summary)}, ensure_ascii=False))  # fmt: skip
    else:
        print(card(result.summary, result.run))
    raise typer.Exit(result.exit_code)


@app.command()
def sweep(
    spec: Annotated[Path | None, typer.Argument(help="YAML file, with its `sweep:` section or with axes below")] = None,
    sets: Sets = None,
    out: Out = Path("results"),
    axis: Annotated[list[str] | None, typer.Option(help="a key and its values", metavar="KEY=V,V")] = None,
    batch_size: Annotated[str | None, typer.Option(help="the axis train.batch_size", metavar="1,2,4")] = None,
    method: Annotated[str | None, typer.Option(help="the axis method", metavar="lora,qlora")] = None,
    repeats: Annotated[int | None, typer.Option(help="runs of each cell, interleaved: measure.repeats")] = None,
    until_oom: Annotated[bool, typer.Option("--until-oom", help="find the largest batch that fits")] = False,
    trial_steps: Annotated[int, typer.Option(min=3, help="--until-oom: optimizer steps of each trial")] = 7,
    effective_batch: Annotated[
        int | None, typer.Option(min=1, help="--until-oom: samples a step, held by accumulation")
    ] = None,
    time_budget: Annotated[str | None, typer.Option(help="start nothing that would end later", metavar="8h")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="run again what failed or timed out")] = False,
    force: Annotated[bool, typer.Option("--force", help="run everything again; earlier runs are set aside")] = False,
    gpus: Annotated[str | None, typer.Option(help="use several GPUs of this machine at once", metavar="0,1")] = None,
    on: Annotated[str | None, typer.Option(help="a Ray cluster: ray, or ray://host:port", metavar="ray")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the runs and their commands")] = False,
    status: Annotated[Path | None, typer.Option(help="where the sweep in this folder stands", metavar="DIR")] = None,
    as_json: Json = False,
) -> None:
    """Run every cell of a grid, each in a process of its own; goes on where it stopped."""
    if status is not None:
        from ftbench.sweep import status as board

        found = board.status(status)
        print(json.dumps(found, ensure_ascii=False) if as_json else board.as_text(found))
        return
    if spec is None:
        raise SpecError("sweep: name a spec file, or ask for a running sweep with --status DIR")
    from ftbench.sweep import command

    short = {"method": method, "train.batch_size": batch_size}
    axes = [*(f"{key}={values}" for key, values in short.items() if values is not None), *(axis or [])]
    changes = [*(sets or []), *([f"measure.repeats={repeats}"] if repeats is not None else [])]
    chosen = [gpu.strip() for gpu in gpus.split(",") if gpu.strip()] if gpus is not None else []
    if gpus is not None and not chosen:
        raise SpecError(f"--gpus {gpus}: name GPUs by number, for example --gpus 0,1")
    request = command.Request(
        spec, changes, axes, out, until_oom, trial_steps, effective_batch, time_budget, retry_failed, force,
        chosen, on,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        ready = command.prepare(request, stack)
        if dry_run:
            lines = command.dry_run(ready)
            print(json.dumps([dataclasses.asdict(line) for line in lines]) if as_json else command.as_text(lines))
            return
        code, tables = command.run(ready)
        if as_json:
            found = {"folder": str(ready.folder), "frontier": tables.frontier(), "runs": tables.records()}
            print(json.dumps(found, ensure_ascii=False))
        else:
            print(tables.terminal(), end="")
    raise typer.Exit(code)


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="run directories, or folders that hold some")],
    format: Annotated[str, typer.Option("--format", help="table, md, csv, json, latex or html")] = "table",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="write to this file instead of stdout")] = None,
    compare: Annotated[str | None, typer.Option(help="hold runs against each other along this", metavar="AXIS")] = None,
    baseline: Annotated[str | None, typer.Option(help="--compare: the value that the others are held against")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="--compare: only pairs of the same recipe")] = False,
    repeats: Annotated[str, typer.Option(help="each, or merge: one row for the runs of a spec on a GPU")] = "each",
    answers: Annotated[bool, typer.Option("--answers", help="also what a night trains, what fits, what to do")] = False,
    hours: Annotated[float | None, typer.Option(help="--answers, --prices: how long a night is (8)")] = None,
    against: Annotated[Path | None, typer.Option(help="earlier runs: exit code 1 if something is worse now")] = None,
    fail_above: Annotated[str | None, typer.Option(help="--against: how much worse is too much (5%)")] = None,
    prices: Annotated[Path | None, typer.Option(help="what GPUs cost: also energy and money", metavar="FILE")] = None,
    references: Annotated[bool, typer.Option("--references", help="published figures beside the runs")] = False,
    estimates: Annotated[
        bool, typer.Option("--estimates", help="also what `ftbench estimate` says of the runs")
    ] = False,
) -> None:
    """Compare runs, also from other machines: one table, or `--compare gpu|method|batch|optimization|model|KEY`."""
    from ftbench.report import command

    found = command.report(command.Request(
        paths, format, compare, baseline, strict, repeats, answers, hours, against, fail_above, prices, references,
        estimates,
    ))  # fmt: skip
    _result(found.text, output)
    raise typer.Exit(1 if found.regressed else 0)


@app.command()
def estimate(
    spec: Annotated[Path | None, typer.Argument(help="YAML file that says what to train and how")] = None,
    sets: Sets = None,
    gpu: Annotated[
        str | None, typer.Option(help="a name of `ftbench list gpus`, or all; this machine's if left out")
    ] = None,
    memory_gb: Annotated[float | None, typer.Option(help="GiB of a GPU that is in no table")] = None,
    gpus: Annotated[int, typer.Option(help="how many GPUs share the work")] = 1,
    strategy: Annotated[
        str | None, typer.Option(help="how they share it", metavar="ddp|fsdp|zero1|zero2|zero3")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="config.json of a model that is not known")] = None,
    check: Annotated[bool, typer.Option("--check", help="exit code 0 fits, 1 uncertain, 2 does not fit")] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="run two steps of the real code on tensors without memory (needs torch)")
    ] = False,
    calibrate: Annotated[Path | None, typer.Option(help="learn from the runs in this folder", metavar="DIR")] = None,
    as_json: Json = False,
) -> None:
    """Say how much memory a spec needs, and whether it fits, without training."""
    from ftbench.estimate import command

    if calibrate is not None:
        print(command.calibrate(calibrate))
        return
    if spec is None:
        raise SpecError("estimate: name a spec file, or learn from runs with --calibrate DIR")
    request = command.Request(spec, sets or [], gpu, memory_gb, gpus, strategy, config)
    if simulate:
        from ftbench import simulation

        answer = simulation.answer(request)
    else:
        answer = command.estimate(request)
    print(answer.document if as_json else answer.text)
    raise typer.Exit(answer.code if check else 0)


@app.command()
def bundle(
    paths: Annotated[list[Path], typer.Argument(help="run directories, or folders that hold some")],
    output: Annotated[Path, typer.Option("-o", "--output", help="the archive to write: x.tar.zst")],
    with_logs: Annotated[bool, typer.Option("--with-logs", help="also what the libraries printed")] = False,
) -> None:
    """Pack runs into one file that others can report and verify; weights, adapters and secrets stay here."""
    from ftbench import bundle as bundles

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
    from ftbench.verify import as_text
    from ftbench.verify import verify as check

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
    from ftbench.importers import About, import_run

    about = About(name, model, method, None if gpu == "cpu" else gpu, batch_size, accumulation, dataset, samples)
    print(import_run(file, about, out).path)


@app.command()
def probe(out: Out = Path("results"), as_json: Json = False) -> None:
    """Measure this machine's ceilings, in a minute at most: products, memory, links, power."""
    from ftbench import probe

    print(f"probing this machine, {probe.LIMIT_S:.0f} s at the most", file=sys.stderr)
    document, path = probe.probe(out)
    print(json.dumps(document, ensure_ascii=False) if as_json else f"{probe.table(document)}\nfile        {path}")


@app.command()
def doctor(
    spec: Annotated[Path | None, typer.Argument(help="a spec that is to run here")] = None,
    sets: Sets = None,
    out: Out = Path("results"),
    as_json: Json = False,
) -> None:
    """Say what is installed, what works on this machine, and what to do about the rest."""
    from ftbench.doctor.examine import examine

    found = examine(spec, sets or [], out)
    print(json.dumps(found.as_dict(), ensure_ascii=False) if as_json else found.table())
    raise typer.Exit(MissingError.exit_code if found.can_run is False else 0)


@app.command("list")
def list_(what: Annotated[str, typer.Argument(help="methods, optimizations, models, datasets, gpus or keys")]) -> None:
    """Show what can be named in a spec."""
    from ftbench.report.catalogue import catalogue

    print(catalogue(what), end="")


def _result(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
    else:
        from ftbench import rundir

        rundir.write_text(output, text)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        print(f"ftbench {__version__}")
        raise typer.Exit


class _Progress:
    """One line on stderr that follows the run, on a terminal only."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()

    def start(self, run: RunDir) -> None:
        print(f"run {run.path}", file=sys.stderr)

    def warn(self, text: str) -> None:
        print(f"ftbench: {text}", file=sys.stderr)

    def tick(self, follower: Follower) -> None:
        if self._live:
            print(f"\r\033[K  {follower.text()}", end="", file=sys.stderr, flush=True)

    def stop(self) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def main() -> None:
    """The console command: errors meant for the user become sentences, and the exit code says what kind they are."""
    try:
        app(standalone_mode=True)
    except FtbenchError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)


def _fail(text: str, code: int) -> None:
    for line in text.splitlines():
        print(f"ftbench: {line}", file=sys.stderr)
    sys.exit(code)
