"""What the commands share: the application, options that several take, and where results and progress go."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ftbench.core.redact import clean, secretless
from ftbench.core.table import printable
from ftbench.core.units import some
from ftbench.errors import MissingError, SpecError

if TYPE_CHECKING:
    from ftbench.launch.follow import Follower
    from ftbench.launch.runner import FinishedRun
    from ftbench.spec.experiment import Experiment
    from ftbench.sweep.command import Ready
    from ftbench.sweep.output.table import Tables

_HALF = 1000  # characters of either end of a line on stderr

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measures what fine-tuning a language model costs on this machine: time, memory, energy, step by step.",
)


def _in_full(wanted: bool) -> bool:
    from ftbench.core.table import show_in_full

    show_in_full(wanted)
    return wanted


def _interval(text: str) -> str:
    from ftbench.core.units import parse_seconds

    if text != "off" and parse_seconds(text) is None:
        raise SpecError(f"--log-every {text}: write it as 60s, 5m or 1h, or off")
    return text


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
LogEvery = Annotated[
    str,
    typer.Option(help="off a terminal: a line on how it goes this often, or off", metavar="60s", callback=_interval),
]
Yes = Annotated[bool, typer.Option("--yes", help="also what will not end well on this machine")]
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list the runs, their commands, what all take")] = False
    prices: Annotated[Path | None, typer.Option(help="--dry-run: what GPUs cost", metavar="FILE")] = None
    log_every: LogEvery = "60s"
    as_json: Json = False
    wide: Wide = False

    def request(self) -> dict[str, Any]:
        """Return what is part of each request for a plan. Raise SpecError for prices of which nothing would be said."""
        if self.prices is not None and (self.as_json or not self.dry_run):
            raise SpecError("--prices: says what a plan costs: give it with --dry-run, and without --json")
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
    text = secretless(result) if isinstance(result, str) else json.dumps(clean(result), ensure_ascii=False)
    print(printable(text), end=end)


def guard(stream: TextIO) -> None:
    """Let text leave by a standard stream without secrets only, whoever writes it."""
    write = stream.write
    stream.write = lambda text: write(secretless(text))  # type: ignore[method-assign]


def tell(text: str) -> None:
    """Print a line of the story on stderr, without the middle of one that repeats a long input."""
    line = printable(secretless(text))
    if (more := len(line) - 2 * _HALF) > 0:
        line = f"{line[:_HALF]}… ({some(more, 'character')} more) …{line[-_HALF:]}"
    print(line, file=sys.stderr)


def train(spec: Path, sets: list[str], out: Path, log_every: str, yes: bool) -> FinishedRun:
    """Train a spec once and show on stderr how it goes. What will not end well on this machine is trained with `yes`,
    or where somebody at a terminal says so."""
    from ftbench.core.units import parse_seconds
    from ftbench.estimate import preflight
    from ftbench.launch import nodes, runner
    from ftbench.spec.load import load
    from ftbench.spec.optimizations import triton_kernels
    from ftbench.spec.sweep import has_axes

    if has_axes(spec, sets):
        tell(
            f"ftbench: note: {spec} has a section `sweep:`, of which `run` knows nothing: this trains the spec without "
            f"it; `ftbench sweep {spec}` runs every cell"
        )

    def on_checked(resolved: Experiment, described: dict[str, Any]) -> None:
        if word := triton_kernels.left_out(load(spec, sets), runner.capability(described)):
            tell(f"ftbench: note: {word}")
        preflight.announce(resolved, described, out, lambda doubt: confirm(doubt, yes), tell)
        if resolved.launch.nodes > 1:
            nodes.number(resolved)  # raises before it is said that others are waited for
            tell(f"waiting for the other machines of the run, {nodes.MEETING_S / 60:.0f} minutes at most")

    line = ProgressLine(parse_seconds(log_every))
    result = runner.run(spec, sets, out, lambda run: tell(f"run {run.path}"), line.show, on_checked)
    line.clear()
    return result


def confirm(doubt: str, yes: bool) -> None:
    """Say why a run will not end well, and ask somebody at a terminal. Raise MissingError where nobody wants it."""
    tell(f"ftbench: {doubt}")
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise MissingError("nothing was started: --yes runs it all the same")
    if not typer.confirm("Run it all the same?", err=True):
        raise MissingError("nothing was started")


def run_plan(ready: Ready, options: PlanOptions) -> tuple[int, Tables]:
    """Run a plan and print its tables; return the exit code and the tables. With --dry-run say what would run, and end
    the command."""
    from ftbench.core.units import parse_seconds
    from ftbench.sweep import command
    from ftbench.sweep import dry_run as planned

    if options.dry_run:
        with uncollected():
            lines = planned.dry_run(ready)
            text = "" if options.as_json else planned.as_text(lines, ready, options.prices)
        emit([dataclasses.asdict(line) for line in lines] if options.as_json else text)
        raise typer.Exit
    code, tables = command.run(ready, parse_seconds(options.log_every))
    emit(tables.document() if options.as_json else tables.terminal(), end="\n" * options.as_json)
    return code, tables


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage meanwhile, nor among what was made afterwards: plans and reports keep what they make until
    the command ends, and looking through it takes time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


class ProgressLine:
    """One line on stderr that follows the run; off a terminal a new one every `log_every_s` seconds."""

    def __init__(self, log_every_s: float | None = None) -> None:
        self._live, self._log_every_s = sys.stderr.isatty(), log_every_s
        self._begun = self._logged = time.monotonic()

    def show(self, follower: Follower) -> None:
        from ftbench.core.units import seconds

        now = time.monotonic()
        text = f"  {follower.text()} · {seconds(now - self._begun)} so far"
        if self._live:
            shown = printable(text)[: shutil.get_terminal_size().columns - 1]
            print(f"\r\033[K{shown}", end="", file=sys.stderr, flush=True)
        elif self._log_every_s and now - self._logged >= self._log_every_s:
            self._logged = now
            tell(text)

    def clear(self) -> None:
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
