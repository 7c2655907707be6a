"""`launch.framework`: checks before a run starts, with stand-ins for the frameworks' interpreters."""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from pathlib import Path

import pytest

import warm
from ftbench.errors import MissingError
from ftbench.launch import frameworks
from ftbench.spec.experiment import resolve
from ftbench.spec.frameworks import FRAMEWORKS
from ftbench.spec.load import load

ROOT = Path(__file__).resolve().parents[1]
SPEC = """model: {id: tiny/qwen3, weights: random}
dataset: {name: sample, samples: 8, max_length: 128}
train: {max_steps: 2}
"""


ANSWERS = '[ "$#" -gt 3 ] && exec echo 5; [ "$3" = axolotl ] && exec echo 0.19.0; exit 1'  # the version, then garbage


def interpreter(folder, script):
    """Write a stand-in for an interpreter."""
    folder.mkdir(exist_ok=True)
    (folder / "python").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "python").chmod(0o755)
    return str(folder / "python")


def run(tmp_path, *changes):
    """Return the arguments of `ftbench run` for the spec with these changes."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    sets = [part for change in changes for part in ("--set", change)]
    return ["run", tmp_path / "spec.yaml", "--out", tmp_path / "out", *sets]


PYTHON = "launch.python=/nowhere/bin/python"
SWIFT, MEGATRON, VERL = (f"launch.framework={name}" for name in ("ms-swift", "megatron", "verl"))
FULL = ("method=full", "model.weights=random")


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (["launch.framework=axolotl"], 2, "needs launch.python"),
        (["launch.framework=axolotl"], 2, "other-frameworks.md"),
        (["launch.python=/usr/bin/python3"], 2, "launch.python is the interpreter of another framework: leave it out"),
        ([SWIFT, PYTHON, "optimizations.packing=on"], 2, "optimizations.packing is not supported by"),
        ([SWIFT, PYTHON, "dataset.eval_samples=8"], 2, "measure.eval needs trl: set it to off"),
        (["launch.framework=llamafactory", PYTHON, "launch.gpus=2"], 2, "factory needs another value (none): set it"),
        (["launch.settings=best"], 2, "leave it out, or use `recipe: fastest` with trl"),
        ([SWIFT, PYTHON, "train.optimizer=adamw_torchao_8bit"], 2, "(adamw_torch, adamw_torch_fused"),
        (["launch.framework=llamafactory", PYTHON, "method=unsloth"], 2, "(lora, qlora, full): set it, or use trl"),
        ([MEGATRON, PYTHON], 2, "method lora: launch.framework megatron needs another value (full)"),
        ([MEGATRON, PYTHON, *FULL, "model.id=tiny/mistral"], 2, "converts llama and qwen3, not mistral: use trl"),
        ([MEGATRON, PYTHON, *FULL, "launch.gpus=2", "launch.strategy=fsdp"], 2, "(none, ddp, tp"),
        ([MEGATRON, PYTHON, *FULL, "launch.settings=best"], 2, "supports only plain settings: leave it out"),
        ([VERL, PYTHON, "method=qlora"], 2, "(lora, full): set it, or use trl"),
        ([VERL, PYTHON, "method.dropout=0.1"], 2, "supports only a whole number as method.alpha"),
        ([VERL, PYTHON, "train.batch_size=5"], 2, "set it to a multiple of 5"),
        ([VERL, PYTHON], 3, "registers its trainer for CUDA only, and this machine has no GPU: use a GPU machine"),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused(tmp_path, ftbench, changes, code, said):
    found, _, errors = ftbench(*run(tmp_path, *changes))
    assert (found, said in " ".join(errors.split())) == (code, True), errors
    assert not (tmp_path / "out").exists()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("python", "said"),
    [("/nowhere/bin/python", "no such interpreter"), (sys.executable, "does not have axolotl")],
)
def test_missing_framework_is_reported(tmp_path, ftbench, python, said):
    code, _, errors = ftbench(*run(tmp_path, "launch.framework=axolotl", f"launch.python={python}"))
    assert code == 3, errors
    assert said in " ".join(errors.split())
    assert "other-frameworks.md" in errors


@pytest.mark.torch
def test_other_version_is_reported(tmp_path, ftbench):
    python = interpreter(tmp_path, "echo 0.1.0")
    code, _, errors = ftbench(*run(tmp_path, "launch.framework=axolotl", f"launch.python={python}"))
    assert code == 3, errors
    assert "has axolotl 0.1.0, but 0.19.0 was tested" in " ".join(errors.split())


def test_best_settings_need_a_gpu(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)
    spec = load(tmp_path / "spec.yaml", [SWIFT, PYTHON, "launch.settings=best"])
    assert frameworks.problems(resolve(spec, (9, 0)), (9, 0)) == []
    (sentence,) = frameworks.problems(resolve(spec, None), None)
    assert sentence == "launch.settings best: its kernels need a GPU, and this machine has none: use plain"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("sets", "package"),
    [
        (["launch.settings=best"], "liger-kernel==0.8.1', or leave launch.settings best out"),
        (
            ["optimizations.attention=flash_attention_2"],
            "flash-attn', or leave optimizations.attention flash_attention_2",
        ),
    ],
)
def test_missing_package_is_named_with_its_setting(tmp_path, sets, package):
    python = interpreter(tmp_path, ANSWERS)
    (tmp_path / "spec.yaml").write_text(SPEC)
    spec = load(tmp_path / "spec.yaml", ["launch.framework=axolotl", f"launch.python={python}", *sets])
    with pytest.raises(MissingError) as told:
        frameworks.check_installed(resolve(spec, (9, 0)))
    assert package in str(told.value)


@pytest.mark.torch
def test_framework_that_cannot_be_imported_is_an_error(tmp_path):
    """Its environment lacks torch."""
    own = f"PYTHONPATH={ROOT / 'tests/without_torch'} exec {sys.executable}"
    python = interpreter(tmp_path, f'if [ "$1" = -c ]; then echo 0.9.5; else {own} "$@"; fi')
    ended = warm.run(run(tmp_path, "launch.framework=llamafactory", f"launch.python={python}"), {**os.environ})
    assert ended.returncode == 1, ended.stderr
    (state,) = (tmp_path / "out").glob("*/*/state.json")
    told = json.loads(state.read_text())
    assert told["state"] == "error"
    assert "No module named 'torch'" in told["reason"]
    assert "Traceback" not in ended.stderr
    configuration = json.loads(state.with_name("framework.json").read_text())
    assert configuration["tokenized_path"] == "data/train"


def test_interpreter_that_hangs_or_prints_no_version_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(frameworks, "_LIMIT_S", 0.5)
    for script, version in (("exec sleep 60", ""), ("printf '\\377'", "\ufffd"), ("exit 1", "")):
        python = interpreter(tmp_path / version, script)
        assert frameworks._version(str(python), "axolotl") == version


def test_page_has_the_tested_versions():
    page = (ROOT / "docs/how-to/other-frameworks.md").read_text()
    for name, framework in FRAMEWORKS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        shown = [each for each in ("transformers", "trl", "peft", "datasets") if each in framework.versions]
        versions = [f"{package} {framework.versions[package]}" for package in shown]
        assert row == f"| `{name}` | {framework.version} | {', '.join(versions)} |"


def committed_runs():
    """Yield the figures of each row of the page, computed from the files of the committed runs."""
    specs = {}
    for path in sorted((ROOT / "results/h200/frameworks").glob("*/*/summary.json")):
        specs.setdefault((path.parent.parent.name, path.parent.name.rpartition("-")[0]), []).append(path)
    for paths in specs.values():
        spec = json.loads(paths[0].with_name("spec.json").read_text())
        way = spec["launch"]["framework"] + ("'s best" if spec["launch"]["settings"] == "best" else "")
        runs = [json.loads(path.read_text()) for path in paths]
        method = spec["method"]["name"]
        if not way.endswith("best"):
            method = "plain" if method == "lora" else f"plain {method}"
        recipe = next((text.removeprefix("recipe=") for text in spec["set"] if text.startswith("recipe=fastest")), "")
        yield (
            recipe or f"{way} {method}", str(len(runs)),
            f"{statistics.geometric_mean(run['tokens_per_s']['real'] for run in runs):,.0f}",
            f"{statistics.geometric_mean(run['memory_gb']['allocated_peak'] for run in runs):.1f}",
            f"{statistics.fmean(run['loss']['first'] for run in runs):.6f}",
        )  # fmt: skip


def test_the_page_s_figures_are_those_of_the_committed_runs():
    page, rows = (ROOT / "docs/evidence/frameworks.md").read_text().partition("<!-- written by")[2], []
    for line in re.findall(r"^\|.*\|$", page.partition("`ftbench report")[0], re.MULTILINE):
        name, *figures = [cell.strip() for cell in line.strip("|").split("|")]
        if figures[0].isdigit():
            rows.append((name.partition(" (")[0], figures[0], figures[1], figures[3], figures[4].split()[0]))
    assert sorted(rows) == sorted(committed_runs())


def test_the_page_lists_what_differs_and_what_does_not():
    page = (ROOT / "docs/evidence/frameworks.md").read_text().partition("<!-- written by")[2]
    for said in (
        "All runs used the same rows in the same order",
        "; trained parameters 21,823,488; type of trained weights float32",
        "axolotl.core.trainers.base.AxolotlTrainer | axolotl, liger_kernel |",
        " differ: applied.trained_dtype: bfloat16 → float32",
    ):
        assert said in page
