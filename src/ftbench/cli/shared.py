"""What the commands share: the application, options that several take, and where results and progress go."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ftbench.core.redact import clean, secretless

if TYPE_CHECKING:
    from ftbench.launch.follow import Follower
    from ftbench.launch.runner import FinishedRun
    from ftbench.sweep.command import Ready
    from ftbench.sweep.output.table import Tables

_HALF = 1000  # characters of either end of a line on stderr
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measures what fine-tuning a language model costs on this machine: time, memory, energy, step by step.",
)


def _in_full(wanted: bool) -> bool:
    from ftbench.core.table import show_in_full

    show_in_full(wanted)
    return wanted


Spec = Annotated[Path, typer.Argument(help="YAML file that says what to train and how")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="change a key: train.batch_size=8", metavar="KEY=VALUE")]
Runs = Annotated[list[Path], typer.Argument(help="run directories, or folders that hold some")]
Out = Annotated[Path, typer.Option("--out", help="where runs are kept")]
Prices = Annotated[Path | None, typer.Option(help="what GPUs cost: also energy and money", metavar="FILE")]
Config = Annotated[Path | None, typer.Option(help="config.json of a model that is not known")]
Store = Annotated[Path, typer.Option(help="runs and probes to learn from")]
Wide = Annotated[
    bool, typer.Option("--wide", help="tables in full, whatever the terminal's width", callback=_in_full, is_eager=True)
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of every command that runs a plan."""

    sets: Sets = None
    out: Out = Path("results")
    time_budget: Annotated[
        str | None, typer.Option("--time-budget", help="start nothing that would end later", metavar="8h")
    ] = None
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="run again what failed or timed out")] = False
    force: Annotated[bool, typer.Option("--force", help="run everything again; earlier runs are set aside")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the runs and their commands")] = False
    as_json: Json = False

    def request(self) -> dict[str, Any]:
        """Return what is part of each request for a plan."""
        return {"sets": [*(self.sets or [])], "out": self.out, "time_budget": self.time_budget,
                "retry_failed": self.retry_failed, "force": self.force}  # fmt: skip


def plan_command(function: Callable[..., None]) -> None:
    """Register a command that has, after its own options, those of `PlanOptions`: it gets them as `options`."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[:-1]
    shared = list(inspect.signature(PlanOptions, eval_str=True).parameters.values())

    @wraps(function)
    def command(**given: Any) -> None:
        options = PlanOptions(**{each.name: given.pop(each.name) for each in shared})
        function(**given, options=options)

    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in (*own, *shared)}
    app.command()(command)


def deliver(text: str, output: Path | None) -> None:
    """Print a result, or write it to the file that was named."""
    if output is None:
        emit(text, end="")
    else:
        from ftbench.store.output import write_output

        write_output(output, text)


def emit(result: object, end: str = "\n") -> None:
    """Print a result on stdout, a document as JSON, without characters that would move the cursor or change colours."""
    text = result if isinstance(result, str) else json.dumps(clean(result), ensure_ascii=False)
    print(printable(text), end=end)


def guard(stream: TextIO) -> None:
    """Let text leave by a standard stream without secrets only, whoever writes it."""
    write = stream.write
    stream.write = lambda text: write(secretless(text))  # type: ignore[method-assign]


def tell(text: str) -> None:
    """Print a line of the story on stderr, without the middle of one that repeats a long input."""
    line = printable(secretless(text))
    if (more := len(line) - 2 * _HALF) > 0:
        line = f"{line[:_HALF]}… ({more:,} characters more) …{line[-_HALF:]}"
    print(line, file=sys.stderr)


def printable(text: str) -> str:
    """Return text without control characters but for line feeds and tabs."""
    return _CONTROL.sub("", text)


def train(spec: Path, sets: list[str], out: Path) -> FinishedRun:
    """Train a spec once and show on stderr how it goes."""
    from ftbench.estimate import preflight
    from ftbench.launch import runner
    from ftbench.store.rundir import first_gpu

    line = ProgressLine()
    result = runner.run(
        spec, sets, out, lambda run: tell(f"run {run.path}"), line.show,
        lambda resolved, described: preflight.announce(
            resolved, first_gpu(described) or None, out, lambda warning: tell(f"ftbench: {warning}"), tell
        ),
    )  # fmt: skip
    line.clear()
    return result


def run_plan(ready: Ready, options: PlanOptions) -> tuple[int, Tables]:
    """Run a plan and print its tables; return the exit code and the tables. With --dry-run say what would run, and end
    the command."""
    from ftbench.sweep import command
    from ftbench.sweep import dry_run as planned

    if options.dry_run:
        with uncollected():
            lines = planned.dry_run(ready)
        emit([dataclasses.asdict(line) for line in lines] if options.as_json else planned.as_text(lines))
        raise typer.Exit
    code, tables = command.run(ready)
    emit(tables.document() if options.as_json else tables.terminal(), end="\n" * options.as_json)
    return code, tables


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage meanwhile: a plan keeps what it makes, and looking through it takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class ProgressLine:
    """One line on stderr that follows the run, on a terminal only."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()

    def show(self, follower: Follower) -> None:
        if self._live:
            print(f"\r\033[K  {printable(follower.text())}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
