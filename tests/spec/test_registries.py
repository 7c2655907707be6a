"""Each declaration in `spec/` has code in `worker/`. Files are found by path, so torch is not imported."""

import ast
from pathlib import Path
from typing import get_args

import pytest

import ftbench
from ftbench.spec.datasets import DATASETS, Format
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import machine_incompatibilities
from ftbench.spec.methods import METHODS
from ftbench.spec.optimizations import OPTIMIZATIONS, ORDER, Optimizations

ROOT = Path(ftbench.__file__).parent


def functions(path):
    """Return the names of functions, and of assigned variables, which may be functions of another module."""
    body = ast.parse(path.read_text()).body
    targets = {
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return targets | {node.name for node in body if isinstance(node, ast.FunctionDef)}


def modules(folder):
    return {path.stem for path in (ROOT / "worker" / folder).glob("*.py")} - {"__init__"}


@pytest.mark.parametrize("name", METHODS)
def test_method_has_a_worker_module_and_gives_a_fix_if_it_needs_a_gpu(name):
    assert {"load", "adapt", "verify"} <= functions(ROOT / "worker" / "methods" / f"{name}.py")
    spec = Experiment.model_validate({"name": "a", "model": {"id": "a/b"}, "method": {"name": name}})
    assert machine_incompatibilities(spec, (9, 0)) == []
    without = machine_incompatibilities(spec, None)
    assert bool(without) == METHODS[name].needs_gpu
    assert all("use lora or qlora" in message for message in without)


def test_worker_modules_have_declarations():
    assert modules("methods") <= set(METHODS)
    assert modules("optimizations") <= set(Optimizations.model_fields)


def test_optimizations_have_worker_modules():
    """Check modules with their names, or the file where batches or the trainer are built."""
    elsewhere = {
        **dict.fromkeys(["fixed_shape", "packing", "padding_free"], "data/collate.py"),
        **dict.fromkeys(["activation_offload", "loader_processes"], "trainer.py"),
        "image_cache": "model/loading.py", "length_grouping": "data/prepare.py",
    }  # fmt: skip
    for name in OPTIMIZATIONS:
        if name in elsewhere:
            assert name in (ROOT / "worker" / elsewhere[name]).read_text("utf-8")
        else:
            assert "verify" in functions(ROOT / "worker" / "optimizations" / f"{name}.py")


def test_order_follows_after():
    assert sorted(ORDER) == sorted(OPTIMIZATIONS)
    for name, kept in OPTIMIZATIONS.items():
        assert all(ORDER.index(other) < ORDER.index(name) for other in kept.after)


def test_datasets_have_a_source():
    own = {"sample": "facts/sample.jsonl", "file": "core/data_files.py", "synthetic": "worker/data/synthetic.py",
           "images": "worker/data/images.py"}  # fmt: skip
    for name, source in DATASETS.items():
        assert bool(source.hub) != (name in own)
        assert source.meaning
        assert source.hub or (ROOT / own[name]).is_file()


def test_formats_are_implemented():
    code = (ROOT / "core" / "data_formats.py").read_text()
    assert [name for name in get_args(Format) if f'"{name}"' not in code] == []
