"""Ranks of one run, and the heavy half of each strategy, in a module of its name with these functions:

arguments(spec) → what the trainer's arguments say of it
verify(trainer, spec) → sentences on what was asked for and is not there, asked after the first step

What is spread over the ranks, and so where one of them alone can do nothing, says `spec/strategies.py`.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType


def rank() -> int | None:
    """Return the number of this process among the ranks of its run; None where it trains alone."""
    return int(os.environ["RANK"]) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None


def is_first() -> bool:
    """Return whether this process is the one that writes what all ranks would: rank 0, or the only one."""
    return not rank()


def load(strategy: str) -> ModuleType:
    """Return the module of a strategy, importing nothing of the others."""
    return importlib.import_module(f"ftbench.worker.parallel.{strategy}")
