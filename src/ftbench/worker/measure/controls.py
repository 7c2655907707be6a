"""What makes a run one that must not learn, so that a check of learning can show that it would notice."""

from typing import Any

import torch
from transformers import TrainerCallback

from ftbench.spec.experiment import Experiment


class Control(TrainerCallback):
    """Spoils each optimizer step as `measure.control` says. Random labels are the data's (`worker/data`), not its."""

    def __init__(self, spec: Experiment) -> None:
        self._control = spec.measure.control

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for group in kwargs["optimizer"].param_groups:
            if self._control == "learning_rate_0":
                group["lr"] = 0.0  # the scheduler writes the next step's
            elif self._control == "reversed_gradient":
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.neg_()
