"""The command of another framework's run: ftbench's own worker prepares it and hands it to the framework's
interpreter."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import Any

from ftbench.core.programs import run_program
from ftbench.errors import MissingError
from ftbench.launch import trl
from ftbench.spec.experiment import Experiment
from ftbench.spec.frameworks import FRAMEWORKS, Framework, interpreter, needs
from ftbench.spec.optimizations import Optimizations
from ftbench.store import machine, shapes

devices, command = trl.devices, trl.command
UNFINISHED = "ftbench-unfinished"  # in an environment as long as it is being made
_LIMIT_S = 30  # a cold disk or a busy machine takes seconds to answer; what hangs takes for ever
_SILENT = "?"  # the answer of what gives none
_VERSION = re.compile(r"[\w.+!-]{1,40}")
_ASK = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
_SWITCHES = {
    "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "DISABLE_VERSION_CHECK": "1", "USE_HF": "1",
}  # fmt: skip
_LOOK_LIMIT_S = 300  # a cold disk takes minutes to import all of a framework
_SAID = {
    "!": ("versions", "torch", "problem"), "versions": {"*": {str}}, "problem": {str, NoneType},
    "torch": ({"!": ("version", "works"), "version": {str}, "works": {bool}},),
}  # fmt: skip
_LOOK = """
import importlib, importlib.metadata as m, json, sys
said = {"versions": {}, "torch": None, "problem": None}
for name in sys.argv[2:]:
    try:
        said["versions"][name] = m.version(name)
    except m.PackageNotFoundError:
        pass
try:
    import torch
    said["torch"] = {"version": torch.__version__, "works": torch.cuda.is_available()}
    importlib.import_module(sys.argv[1])
except BaseException as error:
    said["problem"] = f"{type(error).__name__}: {error}"[:300]
print()
print(json.dumps(said))
"""


def refusals(spec: Experiment, capability: tuple[int, int] | None) -> list[str]:
    """Return what no library can do beside a GPU of this compute capability (None: no GPU)."""
    sentences = trl.refusals(spec, capability)
    if spec.launch.settings == "best" and capability is None:
        sentences.append("launch.settings best: the kernels need a GPU, and there is none: take plain")
    return sentences


def environment(inherited: Mapping[str, str], spec: Experiment) -> dict[str, str]:
    """Return the child's environment: as our own worker's, with what these frameworks would do unasked switched off."""
    return trl.environment(inherited, spec) | _SWITCHES


def check_installed(spec: Experiment) -> None:
    """Raise MissingError with what to type unless our own interpreter can prepare the run and the framework's has it,
    in the version that was tried."""
    trl.check_installed(spec.model_copy(update={"optimizations": Optimizations()}))  # those are the framework's to do
    wanted, python = FRAMEWORKS[spec.launch.framework], interpreter(spec.launch)
    if problem := interpreter_problem(python):
        raise MissingError(f"launch.python: {spec.launch.python}: {problem}; {wanted.way}")
    version = _version(python, wanted.package)
    if not version:
        raise MissingError(f"launch.python: {spec.launch.python} does not have {wanted.package}; {wanted.way}")
    if not _VERSION.fullmatch(version):
        raise MissingError(
            f"launch.python: {spec.launch.python}: does not answer as Python does within {_LIMIT_S} s; {wanted.way}"
        )
    if version != wanted.version and not spec.measure.allow_fallback:
        raise MissingError(
            f"launch.python: {spec.launch.python} has {wanted.package} {version}, and {wanted.version} is what was "
            f"tried: {wanted.way}; measure.allow_fallback=on runs it all the same"
        )
    for package, why in needs(spec, machine.gpu() is not None).items():
        if not _version(python, package):
            tried = f"=={wanted.versions[package]}" if package in wanted.versions else ""
            raise MissingError(
                f"launch.python: {spec.launch.python} does not have {package}, which {why} needs: {spec.launch.python} "
                f"-m pip install '{package}{tried}'" + (f", or leave {why} out" if "." in why else "")
            )


def interpreter_problem(python: str) -> str | None:
    """Return why a file is no interpreter of an environment that is whole."""
    path = Path(python)
    if not path.is_file() or not os.access(path, os.X_OK):
        return "no such interpreter"
    return "its environment was never finished" if (path.parent.parent / UNFINISHED).exists() else None


def framework_of(python: str) -> str | None:
    """Return which framework an environment has, in whatever version."""
    for name, each in FRAMEWORKS.items():
        if (version := _version(python, each.package)) == _SILENT:
            return None  # what says nothing to one question says nothing to the next
        if _VERSION.fullmatch(version):
            return name
    return None


@dataclass(frozen=True, slots=True)
class Contents:
    """What an environment has: versions, torch by its own word, and why the framework's trainer cannot be imported."""

    versions: dict[str, str]
    torch: dict[str, Any] | None
    problem: str | None


def contents(python: str, framework: Framework) -> Contents:
    """Return what an environment has of what was tried with a framework, whose trainer is imported."""
    answer = _answer([python, "-c", _LOOK, framework.entry, *framework.versions], _LOOK_LIMIT_S)
    try:
        said = json.loads(answer.splitlines()[-1])
        shapes.check(said, _SAID)
        return Contents(**said)
    except (ValueError, TypeError, IndexError, RecursionError):
        return Contents({}, None, f"{python} does not answer as Python does within {_LOOK_LIMIT_S} s")


@lru_cache(maxsize=16)
def _version(python: str, package: str) -> str:
    """Return what an interpreter says is the version of a package in its environment: nothing where that is not there,
    no version where it is no interpreter, or says nothing for so long."""
    return _answer([python, "-c", _ASK, package], _LIMIT_S)


def _answer(command: list[str], limit_s: float) -> str:
    """Return what an interpreter prints; `_SILENT` where that does not end."""
    try:
        return run_program(command, limit_s, environment={**os.environ, **_SWITCHES}).stdout.strip()
    except OSError:
        return _SILENT
