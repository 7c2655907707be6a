"""The heavy half of each optimization, in a module of its name with as many of these functions as it needs:

apply(model, spec) → None, before the trainer is built, where the optimization is on
callback(spec) → a TrainerCallback for what can be changed only as training begins, or None
verify(model, spec) → sentences on what was asked for and is not there, asked of every run after its first step
applied(model, spec) → its fields of applied.json

What is done while batches are made, or by the trainer, is verified there (`data/collate.py`, `trainer.py`).
"""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.spec.optimizations import ORDER, switched_on


def modules() -> dict[str, ModuleType]:
    """Return the modules by name, in the order in which they are applied."""
    names = {module.name for module in pkgutil.iter_modules(__path__)}
    return {name: importlib.import_module(f"{__name__}.{name}") for name in ORDER if name in names}


def apply(model: Any, spec: Experiment) -> None:
    """Change the model as its spec asks. Raises SpecError for a model that an optimization does not know."""
    switched = switched_on(spec.optimizations)
    for name, module in modules().items():
        if name in switched and hasattr(module, "apply"):
            module.apply(model, spec)


def callbacks(spec: Experiment) -> list[Any]:
    """Return the callbacks that the trainer is given."""
    made = [module.callback(spec) for module in modules().values() if hasattr(module, "callback")]
    return [callback for callback in made if callback is not None]


def verify(model: Any, spec: Experiment) -> list[str]:
    """Return what was asked for and is not there, a sentence each."""
    verifying = [module for module in modules().values() if hasattr(module, "verify")]
    return [sentence for module in verifying for sentence in module.verify(model, spec)]


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    """Return what the optimizations tell applied.json."""
    telling = [module for module in modules().values() if hasattr(module, "applied")]
    return {key: value for module in telling for key, value in module.applied(model, spec).items()}
