"""Each declaration in `spec/` has code in `worker/`. Files are found by path, so torch is not imported."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import ftbench
from ftbench.spec.datasets import DATASETS, LIKE, Format
from ftbench.spec.experiment import Experiment
from ftbench.spec.incompatibilities import machine_incompatibilities
from ftbench.spec.methods import METHODS
from ftbench.spec.optimizations import OPTIMIZATIONS, ORDER, Optimizations

ROOT = Path(ftbench.__file__).parent


def functions(path):
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def modules(folder):
    return {path.stem for path in (ROOT / "worker" / folder).glob("*.py")} - {"__init__"}


@pytest.mark.parametrize(("name", "method"), METHODS.items())
def test_method_is_listed_by_its_name(name, method):
    assert method.model_fields["name"].default == name
    assert method.__doc__


@pytest.mark.parametrize("name", METHODS)
def test_method_has_a_worker_module(name):
    assert {"load", "adapt", "verify"} <= functions(ROOT / "worker" / "methods" / f"{name}.py")


@pytest.mark.parametrize("name", METHODS)
def test_method_that_needs_a_gpu_gives_a_fix(name):
    spec = Experiment.model_validate({"name": "a", "model": {"id": "a/b"}, "method": {"name": name}})
    assert machine_incompatibilities(spec, (9, 0)) == []
    without = machine_incompatibilities(spec, None)
    assert bool(without) == METHODS[name].needs_gpu
    assert all("use lora or qlora" in message for message in without)


def test_worker_modules_have_declarations():
    assert modules("methods") <= set(METHODS)
    assert modules("optimizations") <= set(Optimizations.model_fields)


@pytest.mark.parametrize("name", OPTIMIZATIONS)
def test_optimization_has_a_worker_module(name):
    """Check a module with its name, or the file where batches or the trainer are built."""
    elsewhere = {
        "activation_offload": ("trainer.py", "optimizations.activation_offload is on and"),
        "fixed_shape": ("data/collate.py", "optimizations.fixed_shape is on and"),
        "image_cache": ("model/loading.py", "optimizations.image_cache"),
        "length_grouping": ("data/prepare.py", "optimizations.length_grouping"),
        "loader_processes": ("trainer.py", "optimizations.loader_processes is on and"),
        "packing": ("data/collate.py", "'packing' if on.packing else 'padding_free'} is on and"),
        "padding_free": ("data/collate.py", "'packing' if on.packing else 'padding_free'} is on and"),
    }
    if name in elsewhere:
        file, sentence = elsewhere[name]
        assert sentence in (ROOT / "worker" / file).read_text("utf-8")
    else:
        assert "verify" in functions(ROOT / "worker" / "optimizations" / f"{name}.py")


def test_order_follows_after():
    assert sorted(ORDER) == sorted(OPTIMIZATIONS)
    for name, kept in OPTIMIZATIONS.items():
        assert all(ORDER.index(other) < ORDER.index(name) for other in kept.after)


@pytest.mark.parametrize("name", Optimizations.model_fields)
def test_optimization_is_off_by_default_and_documented(name):
    field = Optimizations.model_fields[name]
    assert field.default in (False, "off", "auto")
    assert field.description


@pytest.mark.parametrize("script", ["optimizations-table", "spec-reference"])
def test_generated_page_is_current(script):
    subprocess.run([sys.executable, ROOT.parents[1] / "scripts" / script, "--check"], check=True)


@pytest.mark.parametrize("name", DATASETS)
def test_dataset_has_a_source(name):
    source = DATASETS[name]
    own = {"sample": "facts/sample.jsonl", "file": "core/data_files.py", "synthetic": "worker/data/synthetic.py",
           "images": "worker/data/images.py"}  # fmt: skip
    assert bool(source.hub) != (name in own)
    assert source.meaning
    assert source.hub or (ROOT / own[name]).is_file()


def test_length_profile_has_a_sigma():
    assert LIKE
    assert all(DATASETS[name].sigma for name in LIKE)


@pytest.mark.parametrize("name", get_args(Format))
def test_format_is_implemented(name):
    assert f'"{name}"' in (ROOT / "core" / "data_formats.py").read_text()


def test_sample_has_200_pairs():
    assert len((ROOT / "facts" / "sample.jsonl").read_text("utf-8").splitlines()) == 200
