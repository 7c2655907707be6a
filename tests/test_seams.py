"""Every name that a spec can use has an implementation, and every implementation has a name.

spec/test_registries.py checks methods and optimizations.
"""

from __future__ import annotations

import ast
import inspect
import typing
from pathlib import Path

import pytest

from ftbench import cli
from ftbench.cluster.slurm import SlurmSlot
from ftbench.errors import FtbenchError
from ftbench.facts import architectures
from ftbench.families import FAMILIES, describe, vision
from ftbench.launch.checks import LAUNCHERS, Launcher, launcher_of
from ftbench.report.formats import FORMATS, format_of
from ftbench.spec.experiment import Experiment, Launch, resolve
from ftbench.sweep.gpu_slots import GpuSlot, LocalSlot

SOURCE = Path(cli.__file__).parents[1]
SPEC = {"name": "a", "model": {"id": "tiny/qwen3", "weights": "random"}}


def methods_of(protocol: type) -> dict[str, inspect.Signature]:
    members = inspect.getmembers(protocol, inspect.isfunction)
    return {name: inspect.signature(member) for name, member in members if not name.startswith("_")}


def parameters(signature: inspect.Signature) -> list[str]:
    return [name for name in signature.parameters if name != "self"]


def imported_names(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in nodes for alias in node.names} | {node.module for node in nodes}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_has_every_function_of_the_protocol(name):
    for function, signature in methods_of(Launcher).items():
        assert parameters(inspect.signature(getattr(LAUNCHERS[name], function))) == parameters(signature), function


@pytest.mark.parametrize("framework", typing.get_args(Launch.model_fields["framework"].annotation))
def test_a_framework_has_a_launcher_or_is_refused_with_a_way_out(framework):
    python = {} if framework == "trl" else {"python": "/nowhere/bin/python"}
    values = SPEC | {"method": {"name": "full"}, "launch": {"framework": framework, **python}}
    if framework in LAUNCHERS:
        assert launcher_of(resolve(Experiment.model_validate(values), None)) is LAUNCHERS[framework]
    else:
        with pytest.raises((FtbenchError, ValueError), match=r"launch\.framework.*trl"):
            resolve(Experiment.model_validate(values), None)


@pytest.mark.parametrize("slot", [LocalSlot, SlurmSlot])
def test_what_runs_a_cell_has_every_function_of_the_protocol(slot):
    for function, signature in methods_of(GpuSlot).items():
        assert parameters(inspect.signature(getattr(slot, function))) == parameters(signature), function


def test_every_family_of_a_known_model_is_described_and_counts_its_parameters():
    families = {config["model_type"] for config in architectures().values()}
    assert families <= {*FAMILIES, *vision.FAMILIES}
    assert all(describe(config).total > 0 for config in architectures().values())


def test_every_module_of_the_command_line_holds_commands_and_the_other_way_round():
    files = {path.stem for path in (SOURCE / "cli").glob("*.py")} - {"__init__", "shared"}
    assert sorted(files) == sorted(cli.MODULES)
    assert {command.callback.__module__ for command in cli.app.registered_commands} == {
        f"ftbench.cli.{name}" for name in cli.MODULES
    }


def test_every_section_of_a_report_is_made_somewhere():
    sections = {path.stem for path in (SOURCE / "report" / "sections").glob("*.py")} - {"__init__"}
    used = set().union(*(imported_names(path) for path in (SOURCE / "report").rglob("*.py")))
    assert {name for name in sections if f"ftbench.report.sections.{name}" not in used} == set()


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_known_by_the_ending_of_a_file(name):
    ending = {"table": "txt"}.get(name, name)
    assert format_of(Path(f"report.{ending}")) == name
