"""The heavy half of each optimization, in a module of its name:

apply(model, spec) → None, before the trainer is built
proof(model, spec) → sentences on what was asked for and is not there, asked after the first step
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ftbench.spec.optimizations import Optimizations


def load(name: str) -> ModuleType:
    return importlib.import_module(f"ftbench.worker.optimizations.{name}")


def modules() -> dict[str, ModuleType]:
    """Every optimization's module, in the order in which they are applied."""
    return {name: load(name) for name in Optimizations.model_fields}
