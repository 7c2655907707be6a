"""Add a toy optimization and a toy method to a copy of the package, with a declaration and a worker module each."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from warm import Warm

ROOT = Path(__file__).resolve().parents[2]
SPEC_HALF = '''"""A toy."""

from ftbench.spec.base import Optimization


def _incompatibilities(spec):
    if spec.optimizations.packing:
        yield "optimizations.toy supports single samples: set packing to off"


OPTIMIZATIONS = {
    "toy": Optimization(
        description="mark the model",
        incompatibilities=_incompatibilities,
        after=("chunked_loss",),
    )
}
'''
WORKER_HALF = '''"""A toy that marks the model after chunked_loss."""


def apply(model, spec):
    model.marked_by = model.forward.__name__


def verify(model, spec):
    asked = spec.optimizations.toy
    return ["optimizations.toy is on, but the model is not marked"] if asked and not hasattr(model, "marked_by") else []


def applied(model, spec):
    return {"marked_by": getattr(model, "marked_by", None)}
'''
METHOD = '''class Norms(_Method):
    """Train the weights of norms."""

    name: Literal["norms"] = "norms"


'''
METHOD_WORKER_HALF = '''"""Train only the weights of norms."""

from ftbench.worker.model import loading


def load(spec, source):
    return loading.load_model(spec, source)


def adapt(model, spec):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


def verify(model, spec):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad != ("norm" in name)]
'''


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Return a copy of the package, the page and the script, with the toys."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "ftbench", folder / "src" / "ftbench", ignore=ignored)
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "reference", folder / "scripts")
    (folder / "src" / "ftbench" / "spec" / "optimizations" / "toy.py").write_text(SPEC_HALF)
    (folder / "src" / "ftbench" / "worker" / "optimizations" / "toy.py").write_text(WORKER_HALF)
    (folder / "src" / "ftbench" / "worker" / "methods" / "norms.py").write_text(METHOD_WORKER_HALF)
    spec = folder / "src" / "ftbench" / "spec"
    for file, entry, replacement in (
        ("optimizations/__init__.py", "compute, memory\n", "compute, memory, toy\n"),
        ("optimizations/__init__.py", "| memory.OPTIMIZATIONS", "| memory.OPTIMIZATIONS | toy.OPTIMIZATIONS"),
        ("methods.py", "Method = Annotated[Full", f"{METHOD}Method = Annotated[Norms | Full"),
        ("methods.py", '"full": Full,', '"full": Full, "norms": Norms,'),
    ):
        text = (spec / file).read_text()
        assert text.count(entry) == 1
        (spec / file).write_text(text.replace(entry, replacement))
    return folder


SPEC = {
    "model": {"id": "tiny/qwen3", "weights": "random"},
    "dataset": {"name": "synthetic", "samples": 4, "length": 16},
    "train": {"batch_size": 2},
    "method": "norms",
    "optimizations": {"toy": True},
}
PROGRAM = """
import contextlib, io, json, runpy, sys
from ftbench.cli import main
for words in json.loads(sys.argv[1]):
    call = main if words[0] == "ftbench" else lambda: runpy.run_path(words[0], run_name="__main__")
    sys.argv, out, err, code = words, io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            call()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code or 0, out.getvalue(), err.getvalue()]))
"""


def _import_from(source):
    """Import ftbench from this folder from now on."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "ftbench"]:
        del sys.modules[name]
    sys.path.insert(0, str(source))


@pytest.mark.torch
def test_commands_and_pages_have_the_toys(copy, tmp_path):
    """One process runs all commands."""
    reference = copy / "scripts" / "reference"
    lines = [
        "ftbench list optimizations",
        "ftbench list methods",
        "ftbench estimate spec.yaml --gpu 'H200 SXM'",
        "ftbench ablate spec.yaml --only toy --dry-run --json",
        "ftbench run spec.yaml --set optimizations.packing=on",
        f"{reference} --check",
        f"{reference}",
    ]
    (tmp_path / "spec.yaml").write_text(json.dumps(SPEC))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(copy / "src")}
    command = [sys.executable, "-c", PROGRAM, json.dumps([shlex.split(line) for line in lines])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    optimizations, methods, estimate, ablate, run, check, _ = map(json.loads, done.stdout.splitlines())
    assert "mark the model" in optimizations[1]
    assert re.search(r"norms +Train the weights of norms", methods[1])
    assert (estimate[0], "method norms has no formula for memory and time" in estimate[2]) == (2, True)
    assert "toy" in ablate[1]
    assert run[0] == 2
    assert "optimizations.toy supports single samples: set packing to off" in run[2]
    assert "docs/reference is out of date" in check[0]
    row = "| `toy` | on | mark the model |"
    assert row in (copy / "docs" / "reference" / "optimizations.md").read_text("utf-8")


@pytest.mark.torch
@pytest.mark.slow
def test_run_applies_the_toys(copy, tmp_path, cache):
    (tmp_path / "spec.yaml").write_text(json.dumps(SPEC | {"optimizations": {"toy": True, "chunked_loss": True}}))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = Warm(["run", "spec.yaml"], environment, tmp_path, partial(_import_from, copy / "src"))
    _, errors = run.communicate(240)
    (applied,) = tmp_path.glob("results/*/*/applied.json")
    assert run.returncode == 0, errors
    found = json.loads(applied.read_text())
    assert found["marked_by"] == "chunked_forward"
    kinds = found["parameters"]["by_kind"]
    assert {kind for kind in kinds if kinds[kind]["trainable"]} == {"attention", "norm"}  # with q_norm, k_norm
