"""Objectives: keys, fingerprints and incompatibilities."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from ftbench.report.data.facts import spec_facts
from ftbench.spec.experiment import Experiment
from ftbench.spec.identity import fingerprint, slug
from ftbench.spec.load import load, spec_keys
from ftbench.spec.objectives import OBJECTIVES
from ftbench.spec.optimizations import OPTIMIZATIONS, choices
from ftbench.store.rundir import RunDir

TINY = Path(__file__).parents[2] / "configs/grpo-tiny.yaml"
PAIRS = {"name": "synthetic", "samples": 8, "length": 16}


def spec_of(**changes):
    values = {"name": "a", "model": {"id": "a/b"}, "dataset": PAIRS, "objective": {"name": "dpo"}}
    return Experiment.model_validate(values | changes)


def test_objectives_are_listed_by_their_names():
    for name, objective in OBJECTIVES.items():
        assert objective.model_fields["name"].default == name
        assert objective.__doc__


def test_change_of_objective_drops_its_keys(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"model: a/b\nobjective: dpo\ndataset: {json.dumps(PAIRS)}\n")
    assert load(path).objective.beta == 0.1
    assert load(path, ["objective.beta=0.5"]).objective.beta == 0.5
    assert load(path, ["objective.beta=0.5", "objective=sft"]).objective.name == "sft"
    assert load(path, ["objective=grpo", "train.batch_size=8"]).objective.num_generations == 8
    assert ("objective.beta", "0.1", "penalty for moving away from the reference model (dpo)") in spec_keys()
    assert [default for key, default, _ in spec_keys() if key == "objective.beta"] == ["0.1", "0.0"]


def test_sft_keeps_old_fingerprints(tmp_path):
    plain, said = spec_of(objective={"name": "sft"}), Experiment.model_validate(
        {"name": "a", "model": {"id": "a/b"}, "dataset": PAIRS}
    )  # fmt: skip
    assert fingerprint(plain) == fingerprint(said)
    prints = {fingerprint(spec_of(objective={"name": "dpo"} | more)) for more in (
        {}, {"beta": 0.2}, {"precompute_ref_log_probs": True})} | {fingerprint(plain)}  # fmt: skip
    assert len(prints) == 4
    assert slug(spec_of()).startswith("b-lora-dpo-b4-")
    written = said.model_dump(mode="json")
    del written["objective"]  # as in runs of earlier versions
    (tmp_path / "spec.json").write_text(json.dumps(written))
    assert spec_facts(RunDir(tmp_path))["objective.name"] == "sft"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": {"name": "dpo", "beta": 0}}, "greater than 0"),
        ({"objective": {"name": "ppo"}}, "sft.*dpo"),
        ({"objective": {"beta": 0.2}}, "beta"),
        ({"method": {"name": "unsloth"}}, "method unsloth is not supported: use lora"),
        ({"method": {"dropout": 0.1}}, "set method.dropout to 0"),
        ({"launch": {"gpus": 2}}, "launch.gpus is 2: set it to 1"),
        ({"launch": {"framework": "axolotl", "python": "p"}}, "use trl, or objective sft"),
        ({"dataset": {"name": "sample"}}, "the rows of sample are alpaca.*or dataset=synthetic"),
        ({"dataset": {"name": "wikipedia-ja"}}, "the rows of wikipedia-ja are wikipedia-title"),
        ({"dataset": {"name": "file", "path": "x", "format": "messages"}}, "are messages"),
        ({"dataset": {"name": "images", "samples": 4, "image_size": [64, 64]}}, "has images"),
        ({"dataset": PAIRS | {"loss_on": "all"}}, "set dataset.loss_on to completion"),
        ({"optimizations": {"fused_lora": True}}, "set objective.precompute_ref_log_probs to on"),
        ({"optimizations": {"gradient_checkpointing": "selective"}}, "use on or off"),
        ({"optimizations": {"attention": "flash_attention_2"}}, "only eager and sdpa"),
        ({"train": {"optimizer": "adamw_torchao_8bit"}}, "use adamw_torch or adamw_bnb_8bit"),
        ({"objective": {"name": "sft"}, "dataset": {"name": "file", "path": "x", "format": "preference"}},
         "set objective to dpo"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)  # fmt: skip
def test_dpo_incompatibilities(changes, message):
    with pytest.raises(ValidationError, match=message):
        spec_of(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": {"name": "grpo", "num_generations": 1}}, "num_generations"),
        ({"train": {"batch_size": 6, "gradient_accumulation_steps": 2}},
         "the 12 completions per step.*not a multiple of objective.num_generations 8: set train.batch_size to 8"),
        ({"train": {"batch_size": 8}, "dataset": PAIRS | {"samples": 1}}, None),
        ({"train": {"batch_size": 16}, "dataset": PAIRS | {"samples": 1}}, "a step needs 2 prompts.*is 1: raise it"),
        ({"dataset": PAIRS | {"eval_samples": 4}}, "set dataset.eval_samples to 0"),
        ({"dataset": PAIRS | {"loss_on": "all"}}, "set dataset.loss_on to completion"),
        ({"dataset": {"name": "file", "path": "x", "format": "preference"}}, "set dataset.format to prompt"),
        ({"dataset": {"name": "file", "path": "x", "format": "prompt"}}, None),
        ({"dataset": {"name": "images", "samples": 4, "image_size": [64, 64]}}, "supports only text"),
        ({"method": {"name": "unsloth"}}, "use lora, qlora or full"),
        ({"method": {"dropout": 0.1}}, "set method.dropout to 0"),
        ({"method": {"name": "full"}, "objective": {"name": "grpo", "beta": 0.1}}, "set objective.beta to 0, or train"),
        ({"train": {"batch_size": 8, "optimizer": "adamw_torchao_8bit"}}, "use adamw_torch or adamw_bnb_8bit"),
        ({"measure": {"profile": "on"}}, "profile objective sft"),
        ({"train": {"batch_size": 8, "precision": "fp16"}}, "set it to bf16 or fp32"),
        ({"launch": {"gpus": 2}}, "launch.gpus is 2: set it to 1"),
        ({"launch": {"framework": "axolotl", "python": "p"}}, "use trl, or objective sft"),
        ({"optimizations": {"gradient_checkpointing": "selective"}}, "use on or off"),
        ({"optimizations": {"attention": "flash_attention_2"}}, "only eager and sdpa"),
        ({"objective": {"name": "sft"}, "dataset": {"name": "file", "path": "x", "format": "prompt"}},
         "set objective to grpo"),
        ({"objective": {"name": "dpo"}, "dataset": {"name": "file", "path": "x", "format": "prompt"}},
         "rows of file are prompt"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)  # fmt: skip
def test_grpo_incompatibilities(changes, message):
    values = {"objective": {"name": "grpo"}, "train": {"batch_size": 8}} | changes
    if message is None:
        assert spec_of(**values).objective.name == "grpo"
        return
    with pytest.raises(ValidationError, match=message):
        spec_of(**values)


@pytest.mark.parametrize("objective", ["dpo", "grpo"])
def test_untested_optimizations_are_refused(objective):
    for name, declared in OPTIMIZATIONS.items():
        if objective == "grpo" and name in ("attention", "gradient_checkpointing"):
            continue  # test_grpo_incompatibilities
        if objective == "dpo" and not declared.not_with_dpo:
            continue
        optimizations = {name: 512 if name == "image_size" else choices(name)[0]}
        with pytest.raises(ValidationError, match=f"optimizations.{name} with objective {objective}[ :]"):
            spec_of(objective={"name": objective}, train={"batch_size": 8}, optimizations=optimizations)


def test_parity_refuses_grpo(ftbench):
    code, _, err = ftbench("parity", TINY)
    assert (code, "objective grpo: only sft has a loss per sample" in " ".join(err.split())) == (2, True), err
