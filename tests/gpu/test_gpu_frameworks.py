"""unsloth trains on a GPU with its own batches and compilation, and its losses are those of LoRA."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from methods import METHODS, ON_GPU, cases, check_figures

from ftbench.store.steps import read_steps

torch = pytest.importorskip("torch", reason="training libraries are not installed")
pytestmark = [*ON_GPU, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", cases(*(name for name in METHODS if "unsloth" in name)))
def test_it_trains_and_every_figure_is_there(run, name):
    check_figures(*run(*METHODS[name]))


UNSLOTH = {
    "unsloth-unequal": ("padding-free", 0), "unsloth-padded": ("padded", 28), "unsloth-graphs": ("padded", 28),
    "unsloth-packing": ("packed", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", cases(*UNSLOTH))
def test_unsloth_chooses_its_batches_and_each_step_has_the_loss_of_lora(run, name):
    document = run(*METHODS[name])[1]
    found = json.loads(Path(document["run_dir"], "applied.json").read_text())["unsloth"]
    assert (found["batches"], found["compiled_layers"]) == UNSLOTH[name]
    assert found["cuda_graph_shapes"] == (name == "unsloth-graphs")
    if not name.endswith(("unequal", "padded")):
        return
    plain = run(*METHODS["lora-unequal"])[1]
    rows = [read_steps(Path(each["run_dir"], "steps.csv"))[0] for each in (plain, document)]
    for one, two in zip(*rows, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=0.005)
        assert (two.real_tokens, two.label_tokens) == (one.real_tokens, one.label_tokens)
