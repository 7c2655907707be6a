"""Context parallelism through accelerate and torch: each GPU computes its part of every sequence, and keys and values
go round; weights are sharded by FSDP2 over the same GPUs."""

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
_SEQUENCE = 2  # the dimension of queries, keys and values that is divided
_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACK_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_rounds = 0  # how often keys and values went round


def loading(spec: Experiment, config: Any) -> dict[str, Any]:
    """Return nothing that from_pretrained would have to know. Raise SpecError for layers that do not see all of a
    sequence, or carry a state along it: what goes round is masked by position alone."""
    text = config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}
    if kinds or (getattr(text, "sliding_window", None) and not getattr(text, "layer_types", None)):
        raise SpecError(
            f"launch.strategy: cp takes layers that see all of a sequence, and {spec.model.id} has "
            f"{' and '.join(sorted(kinds)) or 'a sliding window'}: use fsdp"
        )
    return {}


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return what the trainer is told: FSDP2's words, and how many parts a sequence has."""
    return fsdp.arguments(spec) | {"parallelism_config": ParallelismConfig(cp_size=spec.launch.ranks)}


def prepare(made: Any) -> None:
    """Count the rounds, and let attention in 32 bits repeat its keys: no kernel that the ring knows takes fewer heads
    of keys there. On a CPU let accelerate shard, and torch's ring take the attention that there is: it knows those of
    GPUs alone."""
    fsdp.prepare(made)
    grouped = sdpa_attention.use_gqa_in_sdpa
    sdpa_attention.use_gqa_in_sdpa = lambda mask, key, value: key.itemsize < 4 and grouped(mask, key, value)
    ring._templated_ring_attention = _counted(ring._templated_ring_attention)
    if made.device.type == "cpu":
        ring.custom_ops |= {_ON_CPU: _attend, _BACK_ON_CPU: _attend_back}


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
    return _divided(results, mesh)


def _attend_back(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    local = {name: each.to_local() for name, each in zip(names, args[:6], strict=True)}
    mesh = args[1].device_mesh
    results = ring._templated_ring_attention_backward(
        mesh.get_group(), _SEQUENCE, op, grad_out_name="grad_out", **local,
        dropout_p=args[6], is_causal=args[7], **kwargs,
    )  # fmt: skip
    return _divided(results, mesh)


def _divided(results: Any, mesh: Any) -> Any:
    return tuple(DTensor.from_local(each, mesh, [Shard(_SEQUENCE)], run_check=False) for each in results)


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return what is not as asked for: weights as under fsdp, and attention that saw the keys of all parts. Without, it
    is computed on each part alone, and nothing says so."""
    sentences = fsdp.verify(trainer, spec)
    if applied(trainer)["rounds"] < len(list(decoder_layers(trainer.model_wrapped))):
        sentences.append("launch.strategy is cp and no layer's keys and values went round")
    return sentences


def applied(trainer: Any) -> dict[str, Any]:
    """Return what FSDP2 has sharded, and how often keys and values went round so far."""
    return fsdp.applied(trainer) | {"rounds": _rounds}
