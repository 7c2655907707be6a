"""Convert weights between the layouts of Hugging Face and Megatron-core, for llama and qwen3.

Megatron fuses queries, keys and values group by group, and gate and up projection. Under tensor parallelism a rank has
a share of the rows or columns of each matrix.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": ["input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["post_attention_layernorm.weight"],
    "self_attention.q_layernorm.weight": ["self_attn.q_norm.weight"],
    "self_attention.k_layernorm.weight": ["self_attn.k_norm.weight"],
    "self_attention.linear_qkv.weight": [f"self_attn.{part}_proj.weight" for part in "qkv"],
    "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
    "mlp.linear_fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.linear_fc2.weight": ["mlp.down_proj.weight"],
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")  # each rank has a share of the columns


def sources(name: str, first_layer: int = 0, tied: bool = False) -> list[str]:
    """Return the Hugging Face names of the matrices in one of Megatron's parameters.

    Args:
        name: The parameter. Its layer counts from the first one of the pipeline stage.
        first_layer: Index of that first layer.
        tied: Whether the head is the embedding; the last stage has a copy of it.
    """
    if match := _LAYER.fullmatch(name):
        return [f"model.layers.{int(match[1]) + first_layer}.{part}" for part in _IN_LAYER[match[2]]]
    return [_OUTSIDE["embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name]]


def share(name: str, parts: Sequence[Tensor], groups: int, rank: int, ranks: int) -> Tensor:
    """Return a tensor-parallel rank's share of a parameter, from its Hugging Face matrices.

    `groups` is the number of key heads. Raise ValueError if the ranks cannot share the parameter evenly.
    """
    if name.endswith("norm.weight"):
        return parts[0]
    if name.endswith("linear_qkv.weight"):
        _require(groups % ranks == 0, name, ranks)
        parts = [torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)]
    dim = 1 if name.endswith(_COLUMNS) else 0
    _require(all(part.shape[dim] % ranks == 0 for part in parts), name, ranks)
    return torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)


def _require(even: bool, name: str, ranks: int) -> None:
    if not even:
        raise ValueError(f"{ranks} GPUs cannot share {name} evenly: use fewer, or strategy ddp")


def joined(name: str, shares: Sequence[Tensor], groups: int, query_rows: int) -> list[Tensor]:
    """Return the Hugging Face matrices of a parameter, from the shares of all tensor-parallel ranks.

    `query_rows` is the number of rows of the query matrix. This is the inverse of `share`.
    """
    if name.endswith("norm.weight"):
        return [shares[0]]
    if name.endswith("linear_fc1.weight"):
        return [torch.cat(part) for part in zip(*(each.chunk(2) for each in shares), strict=True)]
    whole = torch.cat(list(shares), 1 if name.endswith(_COLUMNS) else 0)
    if not name.endswith("linear_qkv.weight"):
        return [whole]
    of_group = whole.unflatten(0, (groups, -1))
    query = query_rows // groups
    key = (of_group.shape[1] - query) // 2
    return [part.flatten(0, 1).contiguous() for part in of_group.split([query, key, key], 1)]


@torch.no_grad()
def read(
    parameters: Mapping[str, Tensor], get: Callable[[str], Tensor], first_layer: int, tied: bool, groups: int,
    rank: int, ranks: int,
) -> None:  # fmt: skip
    """Fill Megatron's parameters. `get` returns a Hugging Face tensor. Raise ValueError for another shape."""
    for name, parameter in parameters.items():
        values = share(name, [get(each) for each in sources(name, first_layer, tied)], groups, rank, ranks)
        if values.shape != parameter.shape:
            raise ValueError(f"{name} is {list(parameter.shape)}, but the checkpoint has {list(values.shape)}")
        parameter.copy_(values)
