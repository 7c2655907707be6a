"""Data files of ftbench: GPUs, shapes of public models, the sample data set."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

SAMPLE = Path(__file__).parent / "sample.jsonl"  # the sample data set
# libyaml's loader takes a tenth of the time, but PyYAML may be built without it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def read_facts(name: str) -> Any:
    """Return the content of a YAML file that ships with ftbench, by its path from this folder. It is cached and must
    not be changed."""
    return yaml.load((Path(__file__).parent / name).read_text("utf-8"), Loader=_LOADER)


# Common values of each family, from the published config.json files.
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
              "rope_theta": 1_000_000.0},
    "qwen3_moe": {"vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
                  "rope_theta": 1_000_000.0, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gpt_oss": {"vocab_size": 201088, "head_dim": 64, "sliding_window": 128, "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5, "rope_theta": 150_000.0},
    "llama": {"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    "mistral": {"vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096, "rms_norm_eps": 1e-5,
                "rope_theta": 10_000.0},
    "qwen2": {"vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
              "rope_theta": 1_000_000.0, "use_sliding_window": False},
}  # fmt: skip


@cache
def architectures() -> dict[str, dict[str, Any]]:
    """Return model id → Hugging Face configuration, enough for a model with random weights."""
    table: dict[str, dict[str, Any]] = {}
    for file in ("architectures.yaml", "tiny.yaml"):
        for family, models in read_facts(file).items():
            for name, shape in models.items():
                config = {"model_type": family, **_FAMILIES.get(family, {}), **shape}
                config.pop("parameters", None)
                table[name] = config
    return table
