"""Train with ms-swift through `sft_main`, which `swift sft` calls."""

import os
from collections.abc import Callable
from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import family
from ftbench.worker.frameworks import DATA, OUTPUT, quantisation, trainer_arguments

TYPES = {"qwen3": "qwen3", "qwen2": "qwen2", "llama": "llama"}  # several types of ms-swift share an architecture


def configuration(spec: Experiment, model: str) -> dict[str, Any]:
    """Return ms-swift's command-line options. The rows are already tokenized, so a chat template is not needed."""
    method: Any = spec.method
    values = trainer_arguments(spec) | {
        "model": model,
        "template": "dummy",
        "torch_dtype": spec.model.dtype,
        "cached_dataset": [f"{DATA}/train"],
        "dataset_shuffle": False,
        "train_dataloader_shuffle": False,
        "split_dataset_ratio": 0,
        "max_length": spec.dataset.max_length,
        "output_dir": OUTPUT,
        "add_version": False,
        "create_checkpoint_symlink": False,
        "check_model": False,  # the check would send the model's name to ModelScope and wait
        "gradient_checkpointing": bool(spec.optimizations.gradient_checkpointing),
        "use_liger_kernel": bool(spec.optimizations.liger),
        "dataloader_num_workers": 0,
        "tuner_type": "lora" if method.adapters else "full",
    }
    if (kind := TYPES.get(family(spec.model) or "")) is not None:
        values["model_type"] = kind
    if spec.optimizations.attention != "auto":
        values["attn_impl"] = spec.optimizations.attention
    if method.adapters:
        values |= {
            "lora_rank": method.rank,
            "lora_alpha": method.alpha,
            "lora_dropout": method.dropout,
            "target_modules": ["all-linear"] if method.targets == "all-linear" else list(method.targets),
        }
    if method.quantised:
        values |= {"quant_method": "bnb", "quant_bits": 4} | quantisation(method)
    return values


def best(spec: Experiment) -> dict[str, Any]:
    """Return ms-swift's best settings: Liger's kernels and loss, and packing without reordering. Packing needs
    flash_attention_2, which separates the samples of a row. With other kernels, padding is faster."""
    packed = {"packing": True, "packing_strategy": "sequential"}
    return {"use_liger_kernel": True} | (packed if spec.optimizations.attention == "flash_attention_2" else {})


def train(values: dict[str, Any]) -> None:
    os.environ.setdefault("MODELSCOPE_CACHE", os.path.abspath(OUTPUT))
    from swift.pipelines.train.sft import sft_main
    from swift.template.base import Template

    Template.encode = _keep_tokenized(Template.encode)
    sft_main([part for name, value in values.items() for part in _option(name, value)])


def _keep_tokenized(encode: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `encode` method of a template to return tokenized rows unchanged. The original method accepts only
    dialogues, and ms-swift replaces other rows by random rows."""

    def encode_row(template: Any, row: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(row, dict) or "input_ids" not in row:
            return encode(template, row, *args, **kwargs)
        lengths = {"lengths": row["lengths"]} if kwargs.get("return_length") else {}
        return {"input_ids": row["input_ids"], "labels": row["labels"], "length": len(row["input_ids"]), **lengths}

    return encode_row


def _option(name: str, value: Any) -> list[str]:
    words = value if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else value]
    return [f"--{name}", *map(str, words)]
