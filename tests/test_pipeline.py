"""Pipeline parallelism over gloo: with SGD without clipping, all ranks together learn the same as one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

from commands import Command, write_spec
from test_several_gpus import KEPT, SGD, assert_same_adapters, figures, learned

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("cache")]
SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
SLIDING = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}
MODELS = {
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, **SLIDING},
    "mistral": {"model_type": "mistral", "tie_word_embeddings": False, "sliding_window": 16},
    "gemma": {"model_type": "gemma", "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", "tie_word_embeddings": True, "sliding_window": 16},
    "gemma3_text": {"model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window": 16},
    "qwen3_moe": {"model_type": "qwen3_moe", "tie_word_embeddings": False, "moe_intermediate_size": 32,
                  "num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
# 21 prompts with answers of different lengths: the last step has too few rows for its micro-batches.
DATA = {"name": "synthetic", "samples": 21, "mean_length": 20, "max_length": 64, "eval_samples": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a spec at a global batch of 8, each spec once per module."""
    runs: dict[str, Command] = {}

    def train(launch: dict[str, Any], family: str = "qwen3", **parts: Any) -> Command:
        key = json.dumps([launch, family, parts])
        if key not in runs:
            runs[key] = run(tmp_path_factory.mktemp("pipeline"), launch, family, parts)
        return runs[key]

    return train


def run(folder: Path, launch: dict[str, Any], family: str, parts: dict[str, Any]) -> Command:
    shape = folder / f"{family}.json"
    shape.write_text(json.dumps(SHAPE | MODELS[family]))
    shares = launch.get("fsdp") or (2 if launch.get("gpus") == 4 else 1)
    train = {"batch_size": 8 // shares, "precision": "fp32", **SGD, **parts.get("train", {})}
    model = {"id": family, "path": str(shape), "weights": "random", "dtype": "float32"}
    spec = write_spec(folder, **{"dataset": DATA, "model": model, **parts, "train": train, "launch": launch})
    with Command(spec, folder / "out") as command:
        command.finish()
    assert command.code == 0, command.stderr
    return command


FULL, LORA = {"method": {"name": "full"}}, {"method": {"name": "lora"}, **KEPT}
SAVED = FULL | KEPT
AGAIN = {"train": {"batch_size": 4, "gradient_accumulation_steps": 2}}
PP, DDP, FSDP, TP = {"pp": 2}, {"gpus": 4, "pp": 2}, {"pp": 2, "fsdp": 2}, {"pp": 2, "tp": 2}
ALL = {"pp": 2, "tp": 2, "fsdp": 2}
exhaustive = partial(pytest.param, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("launch", "family", "parts"),
    [
        (PP, "qwen3", SAVED),
        (DDP, "qwen3", LORA),
        (FSDP, "qwen3", SAVED),
        (TP, "qwen3", LORA),
        exhaustive(PP, "qwen3", LORA),
        exhaustive(PP, "qwen3", FULL | AGAIN),
        exhaustive(DDP, "qwen3", SAVED),
        exhaustive(FSDP, "qwen3", LORA),
        exhaustive(TP, "qwen3", SAVED),
        exhaustive(TP, "llama", FULL),
        exhaustive(ALL, "qwen3", SAVED),
        exhaustive(ALL, "qwen3", LORA),
        *[exhaustive(PP | {"schedule": name}, "qwen3", FULL) for name in ("gpipe", "interleaved-1f1b", "zbv")],
        exhaustive(FSDP | {"schedule": "interleaved-1f1b"}, "qwen3", FULL),
        exhaustive(PP | {"micro_batches": 8, "split": [3, 1]}, "qwen3", FULL),
        exhaustive({"pp": 4}, "qwen3", FULL),
        exhaustive(PP, "qwen3", LORA | {"optimizations": {"gradient_checkpointing": True}}),
        exhaustive(PP, "qwen3", LORA | {"optimizations": {"packing": True}, "dataset": DATA | {"samples": 60}}),
        *[exhaustive(PP, family, FULL) for family in [*MODELS][1:]],
        *[exhaustive(PP, family, LORA) for family in [*MODELS][1:]],
    ],
    ids=str,
)
def test_stages_learn_the_same_as_one_process(trained, launch, family, parts):
    one, several = trained({}, family, **parts | {"train": {}}), trained(launch, family, **parts)
    assert learned(several) == learned(one)
    assert figures(several, "loss") == pytest.approx(figures(one, "loss"), rel=2e-6)
    assert figures(several, "grad_norm") == pytest.approx(figures(one, "grad_norm"), rel=2e-6)
    if "measure" in parts:
        assert_same_adapters(one, several)
    assert several.summary()["parameters"] == one.summary()["parameters"]
