"""Implement the training methods. The module of each method has these functions:

load(spec, source)     Return the model with its weights on the device.
adapt(model, spec)     Return the model with its trainable parameters marked.
verify(model, spec)    Return messages about settings that were not applied.
"""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ftbench.spec.reading import as_text


def load(name: str) -> ModuleType:
    """Return the module of the method `name`, such as `lora`."""
    return importlib.import_module(f"ftbench.worker.methods.{name}")


def mismatches(settings: Mapping[str, tuple[Any, Any]], who: str = "") -> list[str]:
    """Compare the pair `(requested, live)` of each setting, and return a message for each difference."""
    return [
        f"{who}{key} is {as_text(wanted)}, but it trains with {as_text(live)}"
        for key, (wanted, live) in settings.items() if wanted != live
    ]  # fmt: skip
