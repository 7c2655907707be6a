"""axolotl, through `do_train`, as its `axolotl train` calls it."""

from __future__ import annotations

from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.worker.frameworks import DATA, OUTPUT

ATTENTION = {"eager": "eager_attention", "sdpa": "sdp_attention", "flash_attention_2": "flash_attention"}


def configuration(spec: Experiment, model: str) -> dict[str, Any]:
    """Return what its YAML files hold. Its own kernels for LoRA are off: plain layers are what is compared."""
    train, method = spec.train, spec.method
    values = {
        "base_model": model,
        "datasets": [{"path": DATA, "split": "train", "type": None}],
        "dataset_prepared_path": f"{OUTPUT}/prepared",
        "shuffle_merged_datasets": False,
        "curriculum_sampling": True,  # its name for the order of the rows
        "sample_packing": False,
        "pad_to_sequence_len": False,
        "sequence_len": spec.dataset.max_length,
        "val_set_size": 0,
        "output_dir": OUTPUT,
        "micro_batch_size": train.batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "learning_rate": train.learning_rate,
        "lr_scheduler": train.lr_scheduler,
        "warmup_steps": train.warmup_steps,
        "weight_decay": train.weight_decay,
        "optimizer": train.optimizer,
        "max_grad_norm": train.max_grad_norm,
        "seed": train.seed,
        "bf16": train.precision == "bf16",
        "fp16": train.precision == "fp16",
        "tf32": False,
        "gradient_checkpointing": bool(spec.optimizations.gradient_checkpointing),
        "save_strategy": "no",
        "logging_steps": 1_000_000,
        "lora_mlp_kernel": False,
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
    }
    values |= {"max_steps": train.max_steps} if train.max_steps else {"num_epochs": train.epochs}
    if spec.optimizations.liger:
        values |= {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True,
                   "liger_rms_norm": True, "liger_rope": True, "liger_glu_activation": True}  # fmt: skip
    if word := ATTENTION.get(spec.optimizations.attention):
        values[word] = True
    return values | _adapters(method)


def _adapters(method: Any) -> dict[str, Any]:
    if not method.adapters:
        return {}
    every = method.targets == "all-linear"
    return {
        "adapter": method.name,
        "load_in_4bit": method.quantised,
        "lora_r": method.rank,
        "lora_alpha": round(method.alpha),
        "lora_dropout": method.dropout,
        **({"lora_target_linear": True} if every else {"lora_target_modules": list(method.targets)}),
    }


def train(values: dict[str, Any]) -> None:
    from pathlib import Path

    import yaml
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.cli.train import do_train

    file = Path(OUTPUT).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    do_train(load_cfg(str(file)), TrainerCliArgs())
