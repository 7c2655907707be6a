"""What every framework on top of transformers' trainer calls by the trainer's own names."""

from typing import Any

from ftbench.spec.experiment import Experiment


def quantisation(method: Any) -> dict[str, Any]:
    """Return how weights become 4-bit ones, in the words of transformers' configuration of bitsandbytes."""
    return {
        "bnb_4bit_quant_type": method.quant_type,
        "bnb_4bit_use_double_quant": method.double_quant,
        "bnb_4bit_compute_dtype": method.compute_dtype,
    }


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
