"""`launch.framework`: what is refused before anything starts, in a sentence with a way out. Needs no framework."""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from pathlib import Path

import pytest

import warm
from ftbench.doctor import environment
from ftbench.errors import MissingError
from ftbench.launch import frameworks
from ftbench.spec.experiment import resolve
from ftbench.spec.load import load

ROOT = Path(__file__).resolve().parents[1]
SPEC = """model: {id: tiny/qwen3, weights: random}
dataset: {name: sample, samples: 8, max_length: 128}
train: {max_steps: 2}
"""


def run(tmp_path, *changes):
    (tmp_path / "spec.yaml").write_text(SPEC)
    sets = [part for change in changes for part in ("--set", change)]
    return warm.run(["run", tmp_path / "spec.yaml", "--out", tmp_path / "out", *sets], {**os.environ})


PYTHON = "launch.python=/nowhere/bin/python"
SWIFT = "launch.framework=ms-swift"


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (["launch.framework=axolotl"], 2, "needs launch.python"),
        (["launch.framework=axolotl"], 2, "`ftbench env create axolotl DIR` creates one"),
        (["launch.python=/usr/bin/python3"], 2, "launch.python is the interpreter of another framework: leave it out"),
        ([SWIFT, PYTHON, "optimizations.packing=on"], 2, "optimizations.packing is not supported by"),
        ([SWIFT, PYTHON, "measure.save_adapter=on"], 2, "measure.save_adapter needs trl"),
        (["launch.framework=llamafactory", PYTHON, "launch.gpus=2"], 2, "set launch.gpus to 1, or use trl"),
        (["launch.settings=best"], 2, "leave it out, or use `recipe: fastest` with trl"),
        ([SWIFT, PYTHON, "train.optimizer=adamw_torchao_8bit"], 2, "takes torch's and bitsandbytes', or use trl"),
        (["launch.framework=llamafactory", PYTHON, "method=unsloth"], 2, "trains lora, qlora"),
    ],
)  # fmt: skip
def test_what_does_not_reach_the_framework_is_refused(tmp_path, changes, code, said):
    ended = run(tmp_path, *changes)
    assert ended.returncode == code, ended.stderr
    assert said in " ".join(ended.stderr.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("python", "said"),
    [("/nowhere/bin/python", "no such interpreter"), (sys.executable, "does not have axolotl")],
)
def test_an_environment_without_the_framework_is_named_with_the_command_that_makes_one(tmp_path, python, said):
    ended = run(tmp_path, "launch.framework=axolotl", f"launch.python={python}")
    assert ended.returncode == 3, ended.stderr
    assert said in " ".join(ended.stderr.split())
    assert "ftbench env create axolotl DIR" in " ".join(ended.stderr.split())


@pytest.mark.torch
def test_another_version_than_the_one_that_was_tried_is_named(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.1.0\n")
    python.chmod(0o755)
    ended = run(tmp_path, "launch.framework=axolotl", f"launch.python={python}")
    assert ended.returncode == 3, ended.stderr
    assert "has axolotl 0.1.0, and 0.19.0 is what was tried" in " ".join(ended.stderr.split())


def test_the_best_of_a_framework_is_refused_without_a_gpu(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)
    spec = load(tmp_path / "spec.yaml", [SWIFT, PYTHON, "launch.settings=best"])
    assert frameworks.refusals(resolve(spec, (9, 0)), (9, 0)) == []
    (sentence,) = frameworks.refusals(resolve(spec, None), None)
    assert sentence == "launch.settings best: the kernels need a GPU, and there is none: take plain"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("sets", "package"),
    [
        (["launch.settings=best"], "liger-kernel==0.8.1', or leave launch.settings best out"),
        (["optimizations.liger=on"], "liger-kernel==0.8.1', or leave optimizations.liger out"),
        (
            ["optimizations.attention=flash_attention_2"],
            "flash-attn', or leave optimizations.attention flash_attention_2",
        ),
    ],
)
def test_a_package_that_the_environment_lacks_is_named_with_what_wants_it(tmp_path, sets, package):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$3" = axolotl ] && exec echo 0.19.0; exit 1\n')
    python.chmod(0o755)
    (tmp_path / "spec.yaml").write_text(SPEC)
    spec = load(tmp_path / "spec.yaml", ["launch.framework=axolotl", f"launch.python={python}", *sets])
    with pytest.raises(MissingError) as told:
        frameworks.check_installed(resolve(spec, (9, 0)))
    assert package in str(told.value)


@pytest.mark.torch
def test_what_records_a_run_on_a_gpu_is_needed_beside_a_gpu_alone(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$3" = axolotl ] && exec echo 0.19.0; exit 1\n')
    python.chmod(0o755)
    (tmp_path / "spec.yaml").write_text(SPEC)
    spec = resolve(load(tmp_path / "spec.yaml", ["launch.framework=axolotl", f"launch.python={python}"]), None)
    monkeypatch.setattr(frameworks.machine, "gpu", lambda: None)
    frameworks.check_installed(spec)
    monkeypatch.setattr(frameworks.machine, "gpu", lambda: {"name": "NVIDIA H200"})
    with pytest.raises(MissingError, match=r"-m pip install 'nvidia-ml-py==[\d.]+'$"):
        frameworks.check_installed(spec)


@pytest.mark.torch
def test_a_framework_that_cannot_be_imported_ends_as_an_error_with_a_state(tmp_path):
    """A stand-in that answers for its version, and then is a plain Python without the framework."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then echo 0.9.5; else exec {sys.executable} "$@"; fi\n')
    python.chmod(0o755)
    ended = run(tmp_path, "launch.framework=llamafactory", f"launch.python={python}")
    assert ended.returncode == 1, ended.stderr
    (state,) = (tmp_path / "out").glob("*/*/state.json")
    told = json.loads(state.read_text())
    assert told["state"] == "error"
    assert "llamafactory" in told["reason"]
    assert "Traceback" not in ended.stderr
    configuration = json.loads(state.with_name("framework.json").read_text())
    assert configuration["tokenized_path"] == "data/train"


@pytest.mark.parametrize(
    ("script", "said", "limit_s"),
    [
        ("sleep 60 & sleep 60", "?", 0.5), ("setsid sleep 60 & echo 1.0", "1.0", 60),
        ("printf '\\377\\376'", "\ufffd\ufffd", 60), ("echo 1.2", "1.2", 60), ("exit 1", "", 60),
    ],
)  # fmt: skip
def test_an_interpreter_that_hangs_or_prints_what_is_no_version_is_not_waited_for(
    tmp_path, monkeypatch, script, said, limit_s
):
    monkeypatch.setattr(frameworks, "_LIMIT_S", limit_s)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    assert frameworks._version(str(python), "axolotl") == said


@pytest.mark.parametrize("said", ["5", "[5]", '{"versions": [5], "torch": "x", "problem": 5}', "[" * 90_000,
                                  '{"versions": {"x": 5}, "torch": null, "problem": null}',
                                  '{"versions": {}, "torch": {}, "problem": null}'])  # fmt: skip
def test_an_interpreter_that_says_what_no_python_does_is_told(tmp_path, said):
    (tmp_path / "said").write_text(said)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nif [ "$4" ]; then cat {tmp_path}/said; else echo 0.0.1; fi\n')
    python.chmod(0o755)
    (finding,) = [each for each in environment.check(str(python), True) if each.name == "trainer"]
    assert (finding.verdict, "does not answer as Python does" in finding.text) == ("fail", True)


def test_an_interpreter_that_hangs_is_asked_once_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(frameworks, "_LIMIT_S", 0.2)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\nsleep 60\n")
    python.chmod(0o755)
    assert frameworks.framework_of(str(python)) is None
    assert len((tmp_path / "asked").read_text().split()) <= 1


def test_an_interpreter_that_prints_without_end_is_read_no_further(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nyes\n")
    python.chmod(0o755)
    assert frameworks._version(str(python), "axolotl") == "?"


def committed_runs():
    """Return how the page should begin each row, and its figures, by the files of the runs and no other code than
    theirs: those of one spec differ in the end of their names alone."""
    specs = {}
    for path in sorted((ROOT / "results/h200/frameworks").glob("*/*/summary.json")):
        specs.setdefault(path.parent.name.rpartition("-")[0], []).append(path)
    for paths in specs.values():
        spec = json.loads(paths[0].with_name("spec.json").read_text())
        way = spec["launch"]["framework"] + ("'s best" if spec["launch"]["settings"] == "best" else "")
        runs = [json.loads(path.read_text()) for path in paths]
        yield (
            f"{way} {spec['method']['name']}", str(len(runs)),
            f"{statistics.geometric_mean(run['tokens_per_s']['real'] for run in runs):,.0f}",
            f"{statistics.geometric_mean(run['memory_gb']['allocated_peak'] for run in runs):.1f}",
            f"{statistics.fmean(run['loss']['first'] for run in runs):.6f}",
        )  # fmt: skip


def test_the_page_s_figures_are_those_of_the_committed_runs():
    page, rows = (ROOT / "docs/evidence/frameworks.md").read_text().partition("<!-- written by")[2], []
    for line in re.findall(r"^\|.*\|$", page.partition("`ftbench report")[0], re.MULTILINE):
        name, *figures = [cell.strip() for cell in line.strip("|").split("|")]
        if figures[0].isdigit():
            rows.append((name.partition(" (")[0], figures[0], figures[1], figures[4], figures[5].split()[0]))
    assert sorted(rows) == sorted(committed_runs())


def test_the_page_lists_what_differs_and_what_does_not():
    page = (ROOT / "docs/evidence/frameworks.md").read_text().partition("<!-- written by")[2]
    for said in (
        "No run left rows out, changed any, or took them in another order",
        "; trained parameters 21,823,488; trained in float32",
        "axolotl.core.trainers.base.AxolotlTrainer | axolotl, liger_kernel |",
        " differ: applied.trained_dtype: bfloat16 → float32",
    ):
        assert said in page
