"""What every framework on top of transformers' trainer calls by the trainer's own names."""

from __future__ import annotations

from typing import Any

from ftbench.spec.experiment import Experiment


def recipe(spec: Experiment) -> dict[str, Any]:
    """Return the arguments of the spec's recipe; logging and saving are off, as in ftbench's own loop."""
    train = spec.train
    length = {"max_steps": train.max_steps} if train.max_steps else {"num_train_epochs": train.epochs}
    return {
        **length,
        "per_device_train_batch_size": train.batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.lr_scheduler,
        "warmup_steps": train.warmup_steps,
        "weight_decay": train.weight_decay,
        "optim": train.optimizer,
        "max_grad_norm": train.max_grad_norm,
        "seed": train.seed,
        "data_seed": train.seed,
        "bf16": train.precision == "bf16",
        "fp16": train.precision == "fp16",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
