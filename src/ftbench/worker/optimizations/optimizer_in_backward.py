"""Run the optimizer inside the backward pass. When the gradient of a parameter is complete, the optimizer updates the
parameter, and the gradient is freed. `offload` keeps the optimizer states on the host (`kernels/host_states.py`)."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers import TrainerCallback

from ftbench.core.units import GIB
from ftbench.kernels.host_states import HostStates
from ftbench.spec.experiment import Experiment
from ftbench.worker.measure.effective_config import innermost
from ftbench.worker.model.parts import base_model, part_of

_STEPS = "steps_in_backward"  # attribute of the model: the object that updates its parameters


class StepsInBackward(TrainerCallback):
    """Update each parameter when its gradient is complete, store the norm of the gradient, and free the gradient. The
    trainer's optimizer step then finds no gradients and does nothing. `counts` is the number of updates of each
    parameter."""

    def __init__(self, offload: bool) -> None:
        self.counts: dict[Any, int] = {}
        self.states: HostStates | None = None
        self._offload, self._norms = offload, dict[Any, torch.Tensor]()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer, model = innermost(kwargs["optimizer"]), kwargs["model"]
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.states = HostStates(optimizer.state, trained[0].device) if self._offload else None
        self.counts = dict.fromkeys(trained, 0)
        setattr(base_model(model), _STEPS, self)

        def step(parameter: Any) -> None:
            self.counts[parameter] += 1
            self._norms[parameter] = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            if self.states is None:
                optimizer.step()  # skips parameters without a gradient
            else:
                self.states.around(parameter, optimizer.step)
            parameter.grad = None

        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.states is not None:
            self.states.end_step()

    def norm(self, parameters: Iterable[Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the norm over all gradients of the last step. The trainer calls this instead of `clip_grad_norm_`."""
        norms = [self._norms[parameter] for parameter in parameters if parameter in self._norms]
        self._norms.clear()
        return torch.linalg.vector_norm(torch.stack(norms))


def attach(loop: Any, spec: Experiment) -> None:
    """If the spec turns on optimizer_in_backward, make the trainer `loop` update parameters in the backward pass."""
    if setting := spec.optimizations.optimizer_in_backward:
        steps = StepsInBackward(setting == "offload")
        loop.add_callback(steps)
        loop.accelerator.clip_grad_norm_ = steps.norm


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    steps = getattr(base_model(model), _STEPS, None)
    if steps is None or steps.states is None:
        return {}
    return {"optimizer_states_on_host_gb": steps.states.bytes / GIB}


def verify(model: Any, spec: Experiment) -> list[str]:
    setting = spec.optimizations.optimizer_in_backward
    if not setting:
        return []
    steps = getattr(base_model(model), _STEPS, None)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    stepped = {name for name, each in trained.items() if steps and steps.counts[each]}
    # The last layer of a vision encoder may be unused (LLaVA reads the layer before it). It then has no gradient.
    unread = {"vision"} & set(map(part_of, stepped))
    left = [name for name in trained if name not in stepped and part_of(name) not in unread]
    if left or steps is None:
        return [f"optimizations.optimizer_in_backward is {setting} and {left[0]} was not updated in the backward pass"]
    if steps.states is not None and not steps.states.bytes:
        return ["optimizations.optimizer_in_backward is offload and no optimizer state is in host memory"]
    return []
