"""Change gradient checkpointing, which the trainer (SFTConfig) turns on in each layer. `selective` turns it off again
in every second layer. `offload` moves the saved inputs of the layers to host memory (`kernels/host_offload.py`)."""

from typing import Any

from transformers import TrainerCallback

from ftbench.core.units import GIB, percent
from ftbench.kernels.host_offload import HostTensors
from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import decoder_layers

_KEEPS = "ftbench_host_memory"  # attribute of the first layer; it holds the host copies of the layers' inputs


class _Changed(TrainerCallback):
    """Callback that calls `change(model)` when training starts. The trainer has then turned on checkpointing."""

    def __init__(self, change: Any) -> None:
        self._change = change

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._change(model)


def callback(spec: Experiment) -> TrainerCallback | None:
    changes = {"selective": select, "offload": offload}
    change = changes.get(str(spec.optimizations.gradient_checkpointing))
    return change and _Changed(change)


def select(model: Any) -> None:
    """Turn off checkpointing in every second layer."""
    for layer in decoder_layers(model)[1::2]:
        for module in layer.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False


def offload(model: Any) -> HostTensors:
    """Make every checkpointed layer keep its input in host memory. Return the object that stores these inputs."""
    memory = HostTensors()
    layers = decoder_layers(model)
    for layer in layers:
        for module in layer.modules():
            if _is_on(module):
                module._gradient_checkpointing_func = memory.around(module._gradient_checkpointing_func)
    setattr(layers[0], _KEEPS, memory)
    return memory


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    """Return the share of layers with checkpointing and, with `offload`, the GiB moved to the host so far."""
    memory = getattr(decoder_layers(model)[0], _KEEPS, None)
    moved = {} if memory is None else {"checkpoints_moved_gb": memory.moved_bytes / GIB}
    return {"gradient_checkpointing": share(model), **moved}


def share(model: Any) -> float:
    """Return the share of the decoder's layers that recompute their activations."""
    layers = decoder_layers(model)
    return sum(any(_is_on(module) for module in layer.modules()) for layer in layers) / len(layers)


def _is_on(module: Any) -> bool:
    return getattr(module, "gradient_checkpointing", False) is True or type(module).__name__.endswith(
        "CheckpointWrapper"
    )


def requested(spec: Experiment) -> bool | str:
    """Return the requested gradient checkpointing, from `optimizations` or from the option of the method unsloth."""
    own = getattr(spec.method, "use_gradient_checkpointing", "off")
    return spec.optimizations.gradient_checkpointing or own != "off"


def verify(model: Any, spec: Experiment) -> list[str]:
    setting, doing, layers = requested(spec), share(model), len(decoder_layers(model))
    if spec.method.name == "unsloth":  # unsloth marks the model, not its layers
        doing = float(any(_is_on(module) for module in model.modules()))
    wanted = -(-layers // 2) / layers if setting == "selective" else float(bool(setting))
    if doing != wanted:
        return [f"optimizations.gradient_checkpointing is {setting}, but {percent(doing, 0)} of the layers use it"]
    return _verify_offload(model, layers) if setting == "offload" else []


def _verify_offload(model: Any, layers: int) -> list[str]:
    memory = getattr(decoder_layers(model)[0], _KEEPS, None)
    moved, back = (memory.moved, memory.fetched) if memory else (0, 0)
    if moved < layers or back < layers:
        return [
            f"optimizations.gradient_checkpointing is offload and {moved} of {layers} layers copied their input to "
            f"the host and {back} copied it back"
        ]
    return []
