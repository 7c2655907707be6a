"""Other frameworks' training loops on the same tokens, a module each, named as in `launch.framework`:

configuration(spec, model) → the framework's own configuration of the spec; paths are relative to the run's directory
best(spec) → what of it is otherwise at the framework's own best
train(configuration) → train through the framework's own entry; only in an interpreter that has it
"""

import importlib
from types import ModuleType

DATA, MODEL, OUTPUT = "data/train", "data/model", "trainer"  # in the run's directory, as long as the run lasts


def load(name: str) -> ModuleType:
    """Return the module of a framework."""
    return importlib.import_module(f"ftbench.worker.frameworks.{name.replace('-', '_')}")
