"""How each optimization is applied and verified. A module has as many of these functions as it needs:

apply(model, spec): called before the trainer is built, if the optimization is on callback(spec): a TrainerCallback for
changes at the start of training, or None verify(model, spec): one sentence per setting that was not applied; called in
every run after the first step applied(model, spec): the optimization's fields of applied.json

Optimizations of batches or of the trainer are verified in `data/collate.py` and `trainer.py`.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.spec.optimizations import ORDER, switched_on


def modules() -> dict[str, ModuleType]:
    """Return the modules by name, in the order of application."""
    names = {module.name: module.name for module in pkgutil.iter_modules(__path__)} | {"padding_free": "packing"}
    return {name: importlib.import_module(f"{__name__}.{names[name]}") for name in ORDER if name in names}


def apply(model: Any, spec: Experiment) -> None:
    """Apply the optimizations of the spec to a model. Raise SpecError for an unsupported model."""
    switched = switched_on(spec.optimizations)
    for name, module in modules().items():
        if name in switched and hasattr(module, "apply"):
            module.apply(model, spec)


def callbacks(spec: Experiment) -> list[Any]:
    """Return the callbacks that the trainer is given."""
    made = [module.callback(spec) for module in modules().values() if hasattr(module, "callback")]
    return [callback for callback in made if callback is not None]


def verify(model: Any, spec: Experiment) -> list[str]:
    """Return one sentence per setting that was not applied."""
    verifying = [module for module in modules().values() if hasattr(module, "verify")]
    return [sentence for module in verifying for sentence in module.verify(model, spec)]


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    """Return the fields of applied.json from all optimizations."""
    telling = [module for module in modules().values() if hasattr(module, "applied")]
    return {key: value for module in telling for key, value in module.applied(model, spec).items()}
