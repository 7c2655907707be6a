"""Train with LLaMA-Factory through `run_exp`, which `llamafactory-cli train` calls."""

from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.worker.frameworks import DATA, OUTPUT, trainer_arguments

ATTENTION = {"auto": "auto", "eager": "disabled", "sdpa": "sdpa", "flash_attention_2": "fa2"}


def configuration(spec: Experiment, model: str) -> dict[str, Any]:
    """Return the values of LLaMA-Factory's YAML file."""
    method: Any = spec.method
    values = trainer_arguments(spec) | {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": model,
        "template": "empty",
        "dataset": "given",  # a required option, but ignored with tokenized_path
        "tokenized_path": DATA,
        "cutoff_len": spec.dataset.max_length,
        "disable_shuffling": True,
        "output_dir": OUTPUT,
        "flash_attn": ATTENTION[spec.optimizations.attention],
        "disable_gradient_checkpointing": not spec.optimizations.gradient_checkpointing,
        "enable_liger_kernel": bool(spec.optimizations.liger),
        "finetuning_type": "lora" if method.adapters else "full",
        "pure_bf16": not method.adapters and spec.model.dtype == "bfloat16",  # full fine-tuning: keep 16-bit weights
    }
    if method.adapters:
        targets = "all" if method.targets == "all-linear" else ",".join(method.targets)
        values |= {"lora_rank": method.rank, "lora_alpha": round(method.alpha), "lora_dropout": method.dropout,
                   "lora_target": targets}  # fmt: skip
    if method.quantised:
        values |= {"quantization_bit": 4, "quantization_method": "bnb", "quantization_type": method.quant_type,
                   "double_quantization": method.double_quant}  # fmt: skip
    return values


def best(spec: Experiment) -> dict[str, Any]:
    """Return LLaMA-Factory's best settings: Liger's kernels and loss. For unsloth, ftbench has the method `unsloth`.
    LLaMA-Factory does not pack, because ftbench passes samples that are already tokenized."""
    return {"enable_liger_kernel": True}


def train(values: dict[str, Any]) -> None:
    from llamafactory.train.tuner import run_exp

    run_exp(values)
