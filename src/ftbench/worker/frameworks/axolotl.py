"""Train with axolotl through `do_train`, which `axolotl train` calls."""

from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.worker.frameworks import DATA, OUTPUT, quantisation, trainer_arguments

ATTENTION = {"eager": "eager_attention", "sdpa": "sdp_attention", "flash_attention_2": "flash_attention"}
_LIGER = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True,
          "liger_rms_norm": True, "liger_rope": True, "liger_glu_activation": True}  # fmt: skip
# axolotl's names for transformers' arguments. None: axolotl does not have the option.
_NAMES = {
    "per_device_train_batch_size": "micro_batch_size", "lr_scheduler_type": "lr_scheduler", "optim": "optimizer",
    "num_train_epochs": "num_epochs", "data_seed": None, "logging_strategy": None, "report_to": None,
    "disable_tqdm": None,
}  # fmt: skip


def configuration(spec: Experiment, model: str) -> dict[str, Any]:
    """Return the values of axolotl's YAML file. axolotl's LoRA kernels are off, for a comparison with plain layers."""
    values = {word: value for name, value in trainer_arguments(spec).items() if (word := _NAMES.get(name, name))} | {
        "base_model": model,
        "datasets": [{"path": DATA, "split": "train", "type": None}],
        "dataset_prepared_path": f"{OUTPUT}/prepared",
        "shuffle_merged_datasets": False,
        "curriculum_sampling": True,  # keep the order of the rows
        "sample_packing": False,
        "pad_to_sequence_len": False,
        "sequence_len": spec.dataset.max_length,
        "val_set_size": 0,
        "output_dir": OUTPUT,
        "tf32": False,
        "gradient_checkpointing": bool(spec.optimizations.gradient_checkpointing),
        "logging_steps": 1_000_000,
        "lora_mlp_kernel": False,
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
    }
    if spec.optimizations.liger:
        values |= _LIGER
    if word := ATTENTION.get(spec.optimizations.attention):
        values[word] = True
    return values | _adapters(spec.method)


def best(spec: Experiment) -> dict[str, Any]:
    """Return axolotl's best settings: fused LoRA kernels, Liger's kernels and loss, and packing without reordering.
    Packing needs flash_attention_2, which separates the samples of a row. With other kernels, padding is faster.
    axolotl's cut cross-entropy is off, because it needs a package that is not published."""
    kernels = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), spec.method.adapters)
    packed = {"sample_packing": True, "sample_packing_sequentially": True, "pad_to_sequence_len": True}
    return _LIGER | kernels | (packed if spec.optimizations.attention == "flash_attention_2" else {})


def _adapters(method: Any) -> dict[str, Any]:
    if not method.adapters:
        return {}
    all_linear = method.targets == "all-linear"
    return {
        "adapter": method.name,
        "load_in_4bit": method.quantised,
        "lora_r": method.rank,
        "lora_alpha": round(method.alpha),
        "lora_dropout": method.dropout,
        **({"lora_target_linear": True} if all_linear else {"lora_target_modules": list(method.targets)}),
        **({"bnb_config_kwargs": quantisation(method)} if method.quantised else {}),
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
