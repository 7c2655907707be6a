"""Full fine-tuning: all weights are trained in the dtype of the model."""

from typing import Any

from ftbench.core.units import listed
from ftbench.spec.experiment import Experiment
from ftbench.worker.model import loading

load = loading.load_model


def adapt(model: Any, spec: Experiment) -> Any:
    model.requires_grad_(True)
    return model


def verify(model: Any, spec: Experiment) -> list[str]:
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return [f"method full does not train {listed(frozen, 1)}"] if frozen else []
