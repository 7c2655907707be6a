"""Context parallelism through accelerate and torch.

Each GPU computes a part of every sequence. The GPUs form a ring: each GPU passes its keys and values to the next GPU.
FSDP2 shards the weights over the same GPUs.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from transformers.integrations import sdpa_attention

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.worker.model.parts import decoder_layers
from ftbench.worker.parallel import fsdp
from ftbench.worker.parallel.fsdp import attach, reads

__all__ = ["applied", "arguments", "attach", "loading", "prepare", "reads", "verify"]
_SEQUENCE = 2  # dimension of queries, keys and values that is split
_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_rounds = 0  # number of ring passes so far


def loading(spec: Experiment, config: Any) -> dict[str, Any]:
    """Return no arguments. Raise SpecError for layers with local attention or a recurrent state, because ring attention
    only supports causal masks."""
    text = config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}
    if kinds or (getattr(text, "sliding_window", None) and not getattr(text, "layer_types", None)):
        raise SpecError(
            f"launch.strategy: cp supports only full attention, and {spec.model.id} has "
            f"{' and '.join(sorted(kinds)) or 'a sliding window'}: use fsdp"
        )
    return {}


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return the arguments of FSDP2, and accelerate's setting for the number of GPUs that share a sequence."""
    return fsdp.arguments(spec) | {"parallelism_config": ParallelismConfig(cp_size=spec.launch.gpus)}


def prepare(config: Any) -> None:
    """Count the calls of ring attention, and make ring attention work in 32 bits and on a CPU. Its 32-bit kernels do
    not support grouped-query attention, so keys and values are repeated. torch's ring supports only GPU kernels, so on
    a CPU add torch's CPU attention. `fsdp.prepare` makes accelerate shard the model on a CPU."""
    fsdp.prepare(config)
    grouped = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda mask, key, value: key.itemsize < 4 and grouped(mask, key, value)
    ring._templated_ring_attention = _counted(ring._templated_ring_attention)
    if config.device.type == "cpu":
        ring.custom_ops |= {_ON_CPU: _attend, _BACKWARD_ON_CPU: _attend_backward}


def _counted(attend: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _rounds
        _rounds += 1
        return attend(*args, **kwargs)

    return counted


def _attend(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    dropout, causal = args[3:5] + (0.0, False)[len(args) - 3 :]
    local = (each.to_local() for each in args[:3])
    mesh = args[0].device_mesh
    results = ring._templated_ring_attention(
        mesh.get_group(), _SEQUENCE, op, *local, is_causal=causal, dropout_p=dropout, **kwargs
    )
    return _as_shards(results, mesh)


def _attend_backward(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    local = {name: each.to_local() for name, each in zip(names, args[:6], strict=True)}
    mesh = args[1].device_mesh
    results = ring._templated_ring_attention_backward(
        mesh.get_group(), _SEQUENCE, op, grad_out_name="grad_out", **local,
        dropout_p=args[6], is_causal=args[7], **kwargs,
    )  # fmt: skip
    return _as_shards(results, mesh)


def _as_shards(results: Any, mesh: Any) -> Any:
    return tuple(DTensor.from_local(each, mesh, [Shard(_SEQUENCE)], run_check=False) for each in results)


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return the error messages of `fsdp.verify`, and a message if the GPUs did not exchange keys and values. Without
    the exchange, each part of a sequence would silently attend only to itself."""
    problems = fsdp.verify(trainer, spec)
    if applied(trainer)["rounds"] < len(list(decoder_layers(trainer.model_wrapped))):
        problems.append("launch.strategy is cp, but the GPUs did not exchange keys and values")
    return problems


def applied(trainer: Any) -> dict[str, Any]:
    """Return the counts of `fsdp.applied`, and `rounds`: the number of calls of ring attention so far."""
    return fsdp.applied(trainer) | {"rounds": _rounds}
