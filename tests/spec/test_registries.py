"""Each half in `spec/` has its other half in `worker/`. Files are looked for by path: nothing heavy is imported."""

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
def test_a_method_is_listed_under_its_own_name(name, method):
    assert method.model_fields["name"].default == name
    assert method.__doc__


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_its_heavy_half(name):
    assert {"load", "adapt", "verify"} <= functions(ROOT / "worker" / "methods" / f"{name}.py")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_not_refused_on_a_gpu_and_says_why_if_it_needs_one(name):
    spec = Experiment.model_validate({"name": "a", "model": {"id": "a/b"}, "method": {"name": name}})
    assert machine_incompatibilities(spec, (9, 0)) == []
    without = machine_incompatibilities(spec, None)
    assert bool(without) == METHODS[name].needs_gpu
    assert all("use lora or qlora" in told for told in without)


def test_no_heavy_half_stands_without_its_light_half():
    assert modules("methods") <= set(METHODS)
    assert modules("optimizations") <= set(Optimizations.model_fields)


@pytest.mark.parametrize("name", OPTIMIZATIONS)
def test_an_optimization_has_its_heavy_half(name):
    """In a module of its name, or where batches are made or the trainer is."""
    elsewhere = {
        "activation_offload": ("trainer.py", "optimizations.activation_offload is on and"),
        "fixed_shape": ("data/collate.py", "optimizations.fixed_shape is on and"),
        "image_cache": ("model/loading.py", "optimizations.image_cache"),
        "length_grouping": ("data/prepare.py", "optimizations.length_grouping"),
        "loader_processes": ("trainer.py", "optimizations.loader_processes is on and"),
        "tile_buckets": ("data/prepare.py", "optimizations.tile_buckets"),
        "packing": ("data/collate.py", "'packing' if on.packing else 'padding_free'} is on and"),
        "padding_free": ("data/collate.py", "'packing' if on.packing else 'padding_free'} is on and"),
    }
    if name in elsewhere:
        file, sentence = elsewhere[name]
        assert sentence in (ROOT / "worker" / file).read_text("utf-8")
    else:
        assert "verify" in functions(ROOT / "worker" / "optimizations" / f"{name}.py")


def test_each_optimization_is_applied_once_and_after_those_it_names():
    assert sorted(ORDER) == sorted(OPTIMIZATIONS)
    for name, kept in OPTIMIZATIONS.items():
        assert all(ORDER.index(other) < ORDER.index(name) for other in kept.after)


@pytest.mark.parametrize("name", Optimizations.model_fields)
def test_an_optimization_is_off_unless_asked_for_and_explained(name):
    field = Optimizations.model_fields[name]
    assert field.default in (False, "off", "auto")
    assert field.description


def test_the_documentation_has_the_table_of_the_declarations():
    subprocess.run([sys.executable, ROOT.parents[1] / "scripts" / "optimizations-table", "--check"], check=True)


@pytest.mark.parametrize("name", DATASETS)
def test_a_data_set_has_somewhere_to_come_from(name):
    source = DATASETS[name]
    own = {"sample": "facts/sample.jsonl", "file": "core/data_files.py", "synthetic": "worker/data/synthetic.py",
           "images": "worker/data/images.py"}  # fmt: skip
    assert bool(source.hub) != (name in own)
    assert source.meaning
    assert source.hub or (ROOT / own[name]).is_file()


def test_a_length_profile_has_a_spread():
    assert LIKE
    assert all(DATASETS[name].sigma for name in LIKE)


@pytest.mark.parametrize("name", get_args(Format))
def test_a_format_of_rows_has_its_heavy_half(name):
    assert f'"{name}"' in (ROOT / "core" / "data_formats.py").read_text()


def test_the_sample_is_the_two_hundred_pairs_it_says():
    assert len((ROOT / "facts" / "sample.jsonl").read_text("utf-8").splitlines()) == 200
