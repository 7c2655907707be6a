"""An optimization is added by two files and nothing else, a method by a class, its entries and a module: a copy of the
package with a toy of each."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC_HALF = '''"""A toy."""

from ftbench.spec.optimizations.declaration import EXACT, Optimization, Tolerance


def _incompatibilities(spec):
    if spec.optimizations.packing:
        yield "optimizations.toy plays with single samples: set packing to off"


OPTIMIZATIONS = {
    "toy": Optimization(
        description="play with the model",
        verified="the model says that it was played with",
        tolerance=Tolerance(EXACT),
        incompatibilities=_incompatibilities,
        after=("chunked_loss",),
    )
}
'''
WORKER_HALF = '''"""A toy: marks the model, after the loss is chunked."""


def apply(model, spec):
    model.played_with = model.forward.__name__


def verify(model, spec):
    asked = spec.optimizations.toy
    return ["optimizations.toy is on and nobody played"] if asked and not hasattr(model, "played_with") else []


def applied(model, spec):
    return {"played_with": getattr(model, "played_with", None)}
'''
METHOD = '''class Norms(_Method):
    """The weights of the norms."""

    name: Literal["norms"] = "norms"


'''
METHOD_WORKER_HALF = '''"""Norms: their weights are trained, all else is frozen."""

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
    """A copy of the package, the page and the script, with the toys."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "ftbench", folder / "src" / "ftbench", ignore=ignored)
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "optimizations-table", folder / "scripts")
    (folder / "src" / "ftbench" / "spec" / "optimizations" / "toy.py").write_text(SPEC_HALF)
    (folder / "src" / "ftbench" / "worker" / "optimizations" / "toy.py").write_text(WORKER_HALF)
    (folder / "src" / "ftbench" / "worker" / "methods" / "norms.py").write_text(METHOD_WORKER_HALF)
    spec = folder / "src" / "ftbench" / "spec"
    for file, entry, replacement in (
        ("optimizations/__init__.py", "memory, triton_kernels\n", "memory, toy, triton_kernels\n"),
        ("optimizations/__init__.py", "memory, triton_kernels)", "memory, toy, triton_kernels)"),
        ("methods.py", "Method = Annotated[Full", f"{METHOD}Method = Annotated[Norms | Full"),
        ("methods.py", '"full": Full,', '"full": Full, "norms": Norms,'),
    ):
        text = (spec / file).read_text()
        assert text.count(entry) == 1
        (spec / file).write_text(text.replace(entry, replacement))
    return folder


@pytest.fixture
def ftbench(copy, tmp_path):
    """Runs the copy's command on a spec of the tiny model with the toy and these optimizations."""

    def run(*arguments, **optimizations):
        spec = {
            "model": {"id": "tiny/qwen3", "weights": "random"},
            "dataset": {"name": "synthetic", "samples": 4, "length": 16},
            "train": {"batch_size": 2},
            "method": "norms",
            "optimizations": {"toy": True, **optimizations},
        }
        (tmp_path / "spec.yaml").write_text(json.dumps(spec))
        return subprocess.run(
            [sys.executable, "-m", "ftbench", *arguments], cwd=tmp_path, env=_environment(copy), capture_output=True,
            text=True, timeout=240,
        )  # fmt: skip

    return run


def _environment(copy):
    return os.environ | {"PYTHONPATH": str(copy / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_the_toy_is_listed(ftbench):
    assert "play with the model" in ftbench("list", "optimizations").stdout


def test_the_toy_method_is_listed_and_an_estimate_does_not_guess_what_it_takes(ftbench):
    assert re.search(r"norms +The weights of the norms", ftbench("list", "methods").stdout)
    done = ftbench("estimate", "spec.yaml", "--gpu", "H200")
    assert done.returncode == 2
    assert "method norms has no formula for memory and time" in done.stderr


def test_the_toy_is_examined_by_the_doctor(ftbench):
    assert re.search(r"\btoy +works\b", ftbench("doctor").stdout)


@pytest.mark.slow
def test_the_toys_are_applied_and_told_by_the_run(ftbench, tmp_path, cache):
    done = ftbench("run", "spec.yaml", chunked_loss=True)
    (applied,) = tmp_path.glob("results/*/*/applied.json")
    assert done.returncode == 0, done.stderr
    found = json.loads(applied.read_text())
    assert found["played_with"] == "chunked_forward"
    kinds = found["parameters"]["by_kind"]
    assert {kind for kind in kinds if kinds[kind]["trainable"]} == {"attention", "norm"}  # with q_norm, k_norm


def test_the_toy_is_a_variant_of_an_ablation(ftbench, tmp_path):
    lines = ftbench("ablate", "spec.yaml", "--only", "toy", "--dry-run", "--json").stdout
    assert "toy" in lines


def test_the_toy_is_refused_beside_what_it_excludes(ftbench):
    done = ftbench("run", "spec.yaml", packing=True)
    assert done.returncode == 2
    assert "optimizations.toy plays with single samples: set packing to off" in done.stderr


def test_the_toy_gets_a_row_in_the_documentation(copy):
    script = [sys.executable, copy / "scripts" / "optimizations-table"]
    assert subprocess.run([*script, "--check"], capture_output=True).returncode == 1
    subprocess.run(script, check=True)
    row = "| `toy` | on | play with the model | the model says that it was played with | 0.1 % |"
    assert row in (copy / "docs" / "reference" / "optimizations.md").read_text("utf-8")
