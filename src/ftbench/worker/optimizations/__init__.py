"""Apply and verify optimizations. Each module is one optimization and has one or more of these functions:

- apply(model, spec): change the model. ftbench calls it before creating the trainer, if the optimization is on.
- callback(spec): return a TrainerCallback that changes the model at the start of training, or None.
- verify(model, spec): return an error message for each setting that was not applied, after the first step.
- applied(model, spec): return the fields of the optimization in applied.json.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.spec.optimizations import ORDER, switched_on


def modules() -> dict[str, ModuleType]:
    """Return the modules by optimization name, in the order in which `apply` calls them."""
    names = {module.name: module.name for module in pkgutil.iter_modules(__path__)} | {"padding_free": "packing"}
    return {name: importlib.import_module(f"{__name__}.{names[name]}") for name in ORDER if name in names}


def apply(model: Any, spec: Experiment) -> None:
    """Apply the optimizations of the spec to a model. Raise SpecError for an unsupported model."""
    switched = switched_on(spec.optimizations)
    for name, module in modules().items():
        if name in switched and hasattr(module, "apply"):
            module.apply(model, spec)


def callbacks(spec: Experiment) -> list[Any]:
    """Return the TrainerCallbacks of all optimizations."""
    made = [module.callback(spec) for module in modules().values() if hasattr(module, "callback")]
    return [callback for callback in made if callback is not None]


def verify(model: Any, spec: Experiment) -> list[str]:
    """Return an error message for each setting of the spec that was not applied to the model."""
    verifying = [module for module in modules().values() if hasattr(module, "verify")]
    return [sentence for module in verifying for sentence in module.verify(model, spec)]


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    """Return the fields of applied.json from all optimizations."""
    telling = [module for module in modules().values() if hasattr(module, "applied")]
    return {key: value for module in telling for key, value in module.applied(model, spec).items()}
