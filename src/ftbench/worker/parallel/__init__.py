"""Ranks of one run, and the heavy half of each strategy, in a module of its name with these functions:

loading(spec, config) → what from_pretrained is told of it, where it shards the weights as they are read
arguments(spec) → what the trainer's arguments say of it
prepare(made) → None: what is to be changed once the trainer's arguments are `made`, where there is something
attach(trainer, spec) → None: what is to be changed of the trainer once it has its model, where there is something
reads(spec) → whether this rank reads the weights, where not all do: others get them as the model is sharded
verify(trainer, spec) → sentences on what was asked for and is not there, asked after the first step
applied(trainer) → what applied.json tells of it, read after the first step
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment


_MODULES = {"zero1": "zero", "zero2": "zero", "zero3": "zero", "tp+fsdp": "tp_fsdp"}


def rank() -> int | None:
    """Return the number of this process among the ranks of its run; None where it trains alone."""
    return int(os.environ["RANK"]) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None


def is_first() -> bool:
    """Return whether this process is the one that writes what all ranks would: rank 0, or the only one."""
    return not rank()


def node() -> int:
    """Return the number of this machine among those of its run."""
    return int(os.environ.get("GROUP_RANK", "0"))


def is_first_of_node() -> bool:
    """Return whether this process is the first of its run on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def load(strategy: str) -> ModuleType:
    """Return the module of a strategy, importing nothing of the others."""
    return importlib.import_module(f"ftbench.worker.parallel.{_MODULES.get(strategy, strategy)}")


def applied(trainer: Any, spec: Experiment) -> dict[str, Any]:
    """Return the section `parallel` of applied.json; nothing for a process that trains alone."""
    if rank() is None:
        return {}
    launch = spec.launch
    said = {
        "strategy": launch.strategy,
        "ranks": launch.ranks,
        "shares": launch.shares,
        "global_batch": spec.global_batch,
    }
    return {"parallel": said | load(launch.strategy).applied(trainer)}
