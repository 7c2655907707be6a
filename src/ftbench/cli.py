"""The commands on one page: parse, one call, print, exit code. stdout carries the result, stderr the story."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftbench import __version__
from ftbench.errors import INTERRUPTED, FtbenchError, MissingError

if TYPE_CHECKING:
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
    result = runner.run(spec, sets or [], out, live.start, live.tick)
    live.stop()
    if as_json:
        print(json.dumps({"run_dir": str(result.run.path), "state": result.summary.state,
                          "summary": as_dict(result.summary)}, ensure_ascii=False))  # fmt: skip
    else:
        print(card(result.summary, result.run))
    raise typer.Exit(result.exit_code)


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="run directories, or folders that hold some")],
    format: Annotated[str, typer.Option("--format", help="table, md, csv or json")] = "table",
) -> None:
    """Compare runs, also from other machines, in one table."""
    from ftbench.report.collect import collect
    from ftbench.report.render import render

    print(render(collect(paths), format), end="")


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


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        print(f"ftbench {__version__}")
        raise typer.Exit


class _Progress:
    """One line on stderr that follows the run, on a terminal only."""

    def __init__(self) -> None:
        self._run: RunDir | None = None
        self._live = sys.stderr.isatty()

    def start(self, run: RunDir) -> None:
        self._run = run
        print(f"run {run.path}", file=sys.stderr)

    def tick(self) -> None:
        if self._live and self._run:
            from ftbench.runner import progress

            print(f"\r\033[K  {progress(self._run)}", end="", file=sys.stderr, flush=True)

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
