"""Train with other frameworks on the same tokens. Each value of `launch.framework` has a module with these functions:

configuration(spec, model): return the framework's configuration; paths are relative to the run's directory
best(spec): return the changes for the framework's best settings
train(configuration): train through the framework's entry point, in the framework's interpreter

A framework that does not train with transformers.Trainer has `record` instead of `best` and `train`:

record(run, configuration): train, record each step, and write applied.json
"""

import importlib
from types import ModuleType
from typing import Any

from ftbench.spec.experiment import Experiment

# Temporary folders in the run's directory, deleted after training.
DATA, MODEL, OUTPUT = "data/train", "data/model", "trainer"


def load(name: str) -> ModuleType:
    """Return the module of the framework `name`."""
    return importlib.import_module(f"ftbench.worker.frameworks.{name.replace('-', '_')}")


def quantisation(method: Any) -> dict[str, Any]:
    """Return the 4-bit settings of a method under transformers' names."""
    return {
        "bnb_4bit_quant_type": method.quant_type,
        "bnb_4bit_use_double_quant": method.double_quant,
        "bnb_4bit_compute_dtype": method.compute_dtype,
    }


def trainer_arguments(spec: Experiment) -> dict[str, Any]:
    """Return the training settings under transformers' names. Logging and saving are off."""
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
