"""Compute the unused blocks that torch's allocator keeps after batches that are longer than all earlier ones."""

from ftbench.core.units import GIB
from ftbench.estimate.memory import ends, layer, transient
from ftbench.estimate.memory.phases import MemoryCase


def longer_batches(case: MemoryCase, activations: float) -> float:
    """Return the GiB of unused blocks after batches that were longer than all earlier ones, with checkpointing.

    The widest tensors of the MLP need new blocks in such a batch, because free blocks of earlier batches are too small.
    Only tensors whose size does not depend on the length leave blocks for them: the cast of the head, four tensors of
    the loss, and the positions of image features with a gradient (masked_scatter_backward: three int64 per element).

    For float32 adapters, peft casts the input of down_proj to float32. A cast to 8 bits has two float32 copies. In
    other cases, all tensors of the MLP are equally wide. Compiled layers need one of them less in 8 bits, as the
    allocated memory of results/h100/founding-images shows. `activations` (GiB of the largest batch) are already
    counted. The first batch has less."""
    model, plan, last = case.model, case.plan, case.model.layers[-1]
    if not case.records or not last.inner:
        return 0.0
    width, count = plan.adapter * last.inner, 1 + plan.fp8
    cast = plan.adapter > plan.compute and "down_proj" in plan.targets and plan.fused == "off"
    if not cast or plan.compiled or plan.unsloth:
        width = plan.product * last.inner
        count = -(-int(layer.mlp(last, plan) + transient.mlp_peak(last, plan)) // width) - (plan.compiled and plan.fp8)
    scattered = plan.trains_vision or (model.vision is not None and ends.reached(model.vision, plan))
    whole = [ends.head_cast(model, plan), 24 * model.hidden * case.batch.images.tokens * scattered,
             *[ends.logits(model, plan, case.batch) / 4] * 4]  # fmt: skip
    sizes = sorted({-(-width * tokens // 2**21) * 2**21 for tokens in case.records})  # the allocator rounds to 2 MiB
    new = sum(max(0, count - sum(int(each // size) for each in whole)) * size for size in sizes[1:])
    return max(0.0, new / GIB - activations * (1 - case.records[0] / case.records[-1]))
