"""Code shared by the commands: the application, common options, and output to stdout and stderr."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ftbench.core import processes
from ftbench.core.units import parse_seconds
from ftbench.errors import BROKEN_PIPE, INTERRUPTED, MissingError, SpecError

# Keys of the spec that people try as options of `run`, `profile` and `estimate`.
KEYS = {"--gpus": "launch.gpus=2", "--method": "method=qlora", "--batch-size": "train.batch_size=8"}
# Groups of options in --help. The most used options are in a first group without a name.
OUTPUT, INPUT, LIMITS, CLUSTER, ADVANCED = "Output", "Input", "Limits", "Several GPUs", "Advanced"


class Command(TyperCommand):
    """A command with groups of options in its help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options without a group, then each group."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record := parameter.get_help_record(ctx):
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        for name, rows in groups.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows)


class Commands(TyperGroup):
    """The group of all commands. The help shows the full description of each command."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Exit with 130 after Ctrl-C, also at a question."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, typer.Abort):
            log("ftbench: interrupted")
            raise typer.Exit(INTERRUPTED) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the name and the description of each command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in self.commands.items()])


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the help of rich takes three times as long, because it imports a Markdown parser
    help="Measure what fine-tuning a language model costs on this machine: time, memory, energy, step by step.",
)


command = partial(app.command, cls=Command)


def of(panel: str, help: str, *names: str, **more: Any) -> Any:
    """Declare a command-line option. `panel` is the group of the option in --help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def _set_width(wide: bool) -> bool:
    from ftbench.core.table import show_in_full

    show_in_full(wide)
    return wide


def gpu_count(text: str) -> int:
    """Return the value of `--gpus` as an integer. Raise SpecError if it is not from 1 to 1024."""
    if not text.isdecimal() or len(text) > 4 or not 1 <= int(text) <= 1024:
        raise SpecError(f"--gpus {text}: must be a number from 1 to 1024, for example --gpus 2; --gpu names the card")
    return int(text)


def duration(text: str, others: str = "") -> float:
    """Convert a duration such as `8h`, `90m` or `1h30m` to seconds. The error for another text ends with `others`."""
    if (seconds := parse_seconds(text)) is None:
        raise typer.BadParameter(f"{text}: write it as 8h, 90m or 60s{others}")
    return seconds


Spec = Annotated[
    Path, typer.Argument(help="a model (Qwen/Qwen3-8B, or a local folder), or a YAML file that describes the training")
]
Recipe = Annotated[str | None, typer.Option(help="recipe of optimizations: fastest, small … (`ftbench list recipes`)")]
Data = Annotated[
    str | None,
    typer.Option("--dataset", help="your file of samples, or one of `ftbench list datasets`", metavar="FILE"),
]
Length = Annotated[int | None, typer.Option(help="mean tokens per sample, if there is no --dataset")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="change a key: train.batch_size=8", metavar="KEY=VALUE")]
Runs = Annotated[list[Path], typer.Argument(help="run directories, folders with runs, or bundles")]
Out = Annotated[Path, of(OUTPUT, "folder of the results", "--out")]
Output = Annotated[Path | None, of(OUTPUT, "write to this file", "-o", "--output")]
Overwrite = Annotated[bool, of(OUTPUT, "overwrite the file of -o without asking", "--force")]
Prices = Annotated[Path | None, of(INPUT, "file with prices of GPUs: adds energy and cost", metavar="FILE")]
Store = Annotated[Path | None, of(INPUT, "folder of runs and probes (default: results)", exists=True, file_okay=False)]
Wide = Annotated[
    bool,
    of(OUTPUT, "print all columns, whatever the terminal's width", "--wide", callback=_set_width, is_eager=True),
]  # fmt: skip
LogEvery = Annotated[
    Any, of(OUTPUT, "interval of progress lines if stderr is not a terminal, or off", metavar="60s",
            parser=lambda text: 0.0 if text == "off" else duration(text, ", or off"))
]  # fmt: skip
Yes = Annotated[bool, of(OUTPUT, "start without asking, even if the run is likely to fail", "--yes")]
Json = Annotated[bool, of(OUTPUT, "print one JSON document", "--json")]
# Options of all commands that run a plan.
TimeBudget = Annotated[
    Any, of(ADVANCED, "do not start runs that would end later", "--time-budget", metavar="8h", parser=duration)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="only list the runs, their commands and durations")]
RetryFailed = Annotated[bool, of(ADVANCED, "repeat runs that failed or timed out", "--retry-failed")]
Force = Annotated[bool, of(ADVANCED, "repeat all runs and archive the earlier runs", "--force")]


def check_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments. Raise SpecError if an option is a key of the spec."""
    for option in (argument.partition("=")[0] for argument in arguments):
        tried = arguments[0] in ("run", "profile") or (arguments[0] == "estimate" and option != "--gpus")
        if tried and option in KEYS:
            raise SpecError(f"{arguments[0]} has no option {option}: set the key of the spec, --set {KEYS[option]}")
    return arguments


def check_output(output: Path | None, force: bool) -> None:
    """Ask the user before overwriting the file of `-o`. Raise SpecError if the user declines."""
    from ftbench.store.output import output_file

    if output is None or not output_file(output).is_file() or force:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty() and typer.confirm(f"{output} exists. Overwrite it?", err=True)):
        raise SpecError(f"-o {output}: the file exists; add --force to overwrite it, or name another file")


def write_result(text: str, output: Path | None) -> None:
    """Print a result, or write it to the file `output`."""
    if output is None:
        emit(text, end="")
    else:
        from ftbench.store.output import write_output

        write_output(output, text)


def emit(result: object, end: str = "\n") -> None:
    """Print a result on stdout: a string unchanged, any other object as JSON. Control characters are removed.

    Raises:
        typer.Exit: If the reader has closed stdout.
        MissingError: If stdout cannot be written, for example because the disk is full.
    """
    from ftbench.core.table import printable

    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    try:
        print(printable(text), end=end, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again when it exits
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(BROKEN_PIPE) from None
        raise MissingError(f"stdout: {error.strerror}: the result is incomplete") from None


def log(text: str) -> None:
    """Print a line on stderr, wrapped and without control characters."""
    from ftbench.core.table import printable, wrapped

    with processes.optional_stderr():
        print(wrapped(printable(text)), file=sys.stderr, flush=True)
