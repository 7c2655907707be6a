"""Replace norms, rotary embedding, MLP and loss of the model by Liger's Triton kernels."""

from typing import Any

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import base_model


def apply(model: Any, spec: Experiment) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    loss = {"fused_linear_cross_entropy": not spec.optimizations.chunked_loss, "cross_entropy": False}
    try:
        _apply_liger_kernel_to_instance(model=base_model(model), **loss)
    except NotImplementedError as error:  # Granite has no fused loss
        raise SpecError(f"optimizations.liger: {str(error).rstrip('.')}: set it to off") from None


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    """Return the number of modules that use Liger's functions."""
    names = (str(getattr(module.forward, "__module__", "")) for module in model.modules())
    return {"liger_modules": sum("liger_kernel" in name for name in names)}


def verify(model: Any, spec: Experiment) -> list[str]:
    if not spec.optimizations.liger or applied(model, spec)["liger_modules"]:
        return []
    return ["optimizations.liger is on and no module uses Liger's kernels"]
