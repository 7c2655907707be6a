"""Find the rank of this process, and load the module of a strategy. Each strategy has one module with these functions
(`arguments`, `verify` and `applied` are required):

loading(spec, config): return the arguments of from_pretrained that shard the weights while loading
arguments(spec): return arguments for the trainer
prepare(config): make changes after the trainer's arguments `config` are created
attach(trainer, spec): make changes after the trainer is created
reads(spec): return whether this rank reads the weights from files
read(kind, source, config, spec, arguments): load and return the model, instead of from_pretrained
cut(model, spec): return this rank's part of the model, after the method and the optimizations are applied
verify(trainer, spec): return error messages about settings that were not applied, after the first step
applied(trainer): return facts for applied.json, read after the first step
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftbench.spec.base import Launch
    from ftbench.spec.experiment import Experiment

_MODULES = {"zero1": "zero", "zero2": "zero", "zero3": "zero", "tp+fsdp": "tp_fsdp"}  # all pp+… use pp

COMPLETE = "ftbench_complete"  # attribute of a model that lacks the layers of other ranks: a copy with all layers


def rank() -> int | None:
    """Return the rank of this process. Return None in a run with one process."""
    return int(os.environ["RANK"]) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None


def is_first() -> bool:
    """Return whether this process writes the files of the run. It is rank 0 or the only process."""
    return not rank()


def share_of(launch: Launch, rank: int) -> int:
    """Return the data-parallel index of a rank. All ranks of one model replica have the same index."""
    return rank * launch.data_parallel_size // launch.gpus


def facts(spec: Experiment) -> dict[str, Any]:
    """Return the strategy, the number of ranks and of data-parallel shares, and the global batch size."""
    launch = spec.launch
    sizes = {"ranks": launch.gpus, "shares": launch.data_parallel_size, "global_batch": spec.global_batch}
    return {"strategy": launch.strategy, **sizes}


def load(strategy: str) -> ModuleType:
    """Import and return the module of a strategy."""
    return importlib.import_module(f"ftbench.worker.parallel.{_MODULES.get(strategy, strategy.partition('+')[0])}")


def complete(model: Any) -> Any:
    """Return `model` or, with pp, its copy that has all layers. The copy has shapes but no values (meta device)."""
    return model.__dict__.get(COMPLETE, model)


def applied(trainer: Any, spec: Experiment) -> dict[str, Any]:
    """Return the section `parallel` of applied.json. The section is empty for a single process."""
    return {} if rank() is None else {"parallel": facts(spec) | load(spec.launch.strategy).applied(trainer)}
