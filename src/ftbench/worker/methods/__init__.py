"""The heavy half of each method, in a module of its name:

load(spec, source) → the model with its weights on the device
adapt(model, spec) → the model with what is trained marked as trainable
verify(model, spec) → sentences on what was asked for and is not there; empty when all is well
"""

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """Return the module of a method; `spec.methods.METHODS` says which there are."""
    return importlib.import_module(f"ftbench.worker.methods.{name}")
