"""Replace norms, rotary embedding, MLP and loss of the model by Liger's Triton kernels."""

from typing import Any

from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import base_model


def apply(model: Any, spec: Experiment) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    base = base_model(model)
    loss = {"fused_linear_cross_entropy": not spec.optimizations.chunked_loss, "cross_entropy": False}
    _apply_liger_kernel_to_instance(model=base, **loss)


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    return {"liger_modules": modules(model)}


def modules(model: Any) -> int:
    """Return the number of modules that use Liger's functions."""
    return sum("liger_kernel" in str(getattr(module.forward, "__module__", "")) for module in model.modules())


def verify(model: Any, spec: Experiment) -> list[str]:
    if not spec.optimizations.liger:
        return []
    return [] if modules(model) else ["optimizations.liger is on and no module uses Liger's kernels"]
