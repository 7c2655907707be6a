"""The implementation of each method, in a module of its name.

load(spec, source)     Return the model with its weights on the device.
adapt(model, spec)     Return the model with its trainable parameters marked.
verify(model, spec)    Return messages about settings that were not applied.
"""

import importlib
from types import ModuleType


def load(name: str) -> ModuleType:
    """Return the module of a method in `spec.methods.METHODS`."""
    return importlib.import_module(f"ftbench.worker.methods.{name}")
