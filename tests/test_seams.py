"""Every name that a spec can use has an implementation, and every implementation has a name.

spec/test_registries.py checks methods and optimizations.
"""

from __future__ import annotations

import ast
import typing
from pathlib import Path

import pytest

from ftbench import cli
from ftbench.errors import FtbenchError
from ftbench.facts import architectures
from ftbench.families import FAMILIES, describe, vision
from ftbench.launch.checks import LAUNCHERS, launcher_of
from ftbench.report.formats import FORMATS, format_of
from ftbench.spec.experiment import Experiment, Launch, resolve

SOURCE = Path(cli.__file__).parents[1]
SPEC = {"name": "a", "model": {"id": "tiny/qwen3", "weights": "random"}}


def imported_names(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    return {f"{node.module}.{alias.name}" for node in nodes for alias in node.names} | {node.module for node in nodes}


@pytest.mark.parametrize("framework", typing.get_args(Launch.model_fields["framework"].annotation))
def test_a_framework_has_a_launcher_or_is_refused_with_a_way_out(framework):
    python = {} if framework == "trl" else {"python": "/nowhere/bin/python"}
    values = SPEC | {"method": {"name": "full"}, "launch": {"framework": framework, **python}}
    if framework in LAUNCHERS:
        assert launcher_of(resolve(Experiment.model_validate(values), None)).__name__.endswith(LAUNCHERS[framework])
    else:
        with pytest.raises((FtbenchError, ValueError), match=r"launch\.framework.*trl"):
            resolve(Experiment.model_validate(values), None)


def test_every_family_of_a_known_model_is_described_and_counts_its_parameters():
    families = {config["model_type"] for config in architectures().values()}
    assert families <= {*FAMILIES, *vision.FAMILIES}
    assert all(describe(config).total > 0 for config in architectures().values())


def test_every_section_of_a_report_is_made_somewhere():
    sections = {path.stem for path in (SOURCE / "report" / "sections").glob("*.py")} - {"__init__"}
    used = set().union(*(imported_names(path) for path in (SOURCE / "report").rglob("*.py")))
    assert {name for name in sections if f"ftbench.report.sections.{name}" not in used} == set()


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_known_by_the_ending_of_a_file(name):
    ending = {"table": "txt"}.get(name, name)
    assert format_of(Path(f"report.{ending}")) == name
