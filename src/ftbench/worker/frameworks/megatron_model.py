"""Build a model and an optimizer of Megatron-core, with Megatron's local layers and torch's attention.

Weights of llama and qwen3 are converted between the layouts of Hugging Face and Megatron. Megatron has one matrix for
the query, key and value projections, ordered by key head, and one matrix for the gate and up projections. With tensor
parallelism, each rank has a part of the rows or columns of each matrix.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from ftbench.errors import MissingError, SpecError
from ftbench.spec.frameworks import MEGATRON_FAMILIES
from ftbench.worker.device import device

# Values of `rope_scaling` that are constants in Megatron.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def supported(values: dict[str, Any], name: str) -> Any:
    """Return the configuration of the model. Raise SpecError if Megatron does not support the model or its sharding."""
    config = AutoConfig.from_pretrained(values["load"])
    rope = config.rope_parameters
    kind, llama3 = rope.get("rope_type", "default"), {key: float(rope.get(key, 0)) for key in _LLAMA3}
    window = getattr(config, "use_sliding_window", False) and config.sliding_window
    unsupported = {
        f"model_type {config.model_type}": config.model_type not in MEGATRON_FAMILIES,
        f"rope_type {kind}": kind != "default" and not (kind == "llama3" and llama3 == _LLAMA3),
        f"hidden_act {config.hidden_act}": config.hidden_act != "silu",
        "biases": getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False),
        "a sliding window": window,
    }
    if others := [each for each, present in unsupported.items() if present]:
        raise SpecError(
            f"model {name}: launch.framework megatron supports {' and '.join(MEGATRON_FAMILIES)} without biases, but "
            f"this model has {', '.join(others)}: use trl"
        )
    tp, pp = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    for what, count, ranks in (
        ("key heads", config.num_key_value_heads, tp), ("rows of the embedding", config.vocab_size, tp),
        ("columns of the MLP", config.intermediate_size, tp), ("layers", config.num_hidden_layers, pp),
    ):  # fmt: skip
        if count % ranks:
            raise SpecError(
                f"model {name}: launch.framework megatron cannot divide {count:,} {what} among {ranks} GPUs evenly: "
                "set launch.gpus to a divisor, or launch.strategy to ddp"
            )
    return config


def parameters(model: Any) -> dict[str, Tensor]:
    """Return the parameters of this rank by Megatron's names."""
    return {name.removeprefix("module."): value for name, value in model.named_parameters()}


def read_weights(model: Any, config: Any, values: dict[str, Any]) -> None:
    """Copy this rank's part of the checkpoint to the model. Raise MissingError if weights do not fit the model."""
    from megatron.core.parallel_state import get_tensor_model_parallel_rank

    files = [safe_open(file, "pt") for file in _files(values["load"])]
    owner = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    layers = model.module.decoder.layers
    first = int(layers[0].layer_number) - 1 if len(layers) else 0
    layout = first, config.tie_word_embeddings, config.num_key_value_heads
    ranks = get_tensor_model_parallel_rank(), values["tensor_model_parallel_size"]
    try:
        fill(parameters(model), lambda name: owner[name].get_tensor(name), *layout, *ranks)
    except (KeyError, ValueError) as error:
        raise MissingError(
            f"model {values['load']}: its checkpoint does not fit its config.json ({error}): complete its files, or "
            "set model.weights=random"
        ) from None


def _files(source: str) -> list[str]:
    """Return the safetensors files of the checkpoint `source`, which is a folder or a model id on the hub."""
    if Path(source).is_dir():
        return [str(file) for file in sorted(Path(source).glob("*.safetensors"))]
    if index := cached_file(source, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False):
        return list(get_checkpoint_shard_files(source, index)[0])
    return [str(cached_file(source, "model.safetensors"))]


def build(config: Any, values: dict[str, Any]) -> Any:
    """Return the model in Megatron's DistributedDataParallel, which contains the gradient buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.parallel_state import is_pipeline_first_stage, is_pipeline_last_stage

    transformer, rope = _transformer(config, values), config.rope_parameters
    layer = get_gpt_layer_local_spec(qk_layernorm=transformer.qk_layernorm, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = SdpaAttention
    model = GPTModel(
        transformer, layer, config.vocab_size, config.max_position_embeddings, pre_process=is_pipeline_first_stage(),
        post_process=is_pipeline_last_stage(), share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope", rotary_base=rope["rope_theta"],
        rope_scaling=rope.get("rope_type", "default") == "llama3", rope_scaling_factor=rope.get("factor", 8.0),
    ).to(device())  # fmt: skip
    buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=values["accumulate_allreduce_grads_in_fp32"])
    wrapped = DistributedDataParallel(transformer, buffers, model)
    transformer.no_sync_func, transformer.finalize_model_grads_func = wrapped.no_sync, finalize_model_grads
    return wrapped


def _transformer(config: Any, values: dict[str, Any]) -> Any:
    from megatron.core.transformer import TransformerConfig

    dtype = getattr(torch, values["params_dtype"])
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads, num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim, qk_layernorm=config.model_type == "qwen3", normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps, gated_linear_unit=True, activation_func=functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, persist_layer_norm=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False,
        bias_activation_fusion=False, params_dtype=dtype, pipeline_dtype=dtype, bf16=values["bf16"],
        use_cpu_initialization=device().type == "cpu", variable_seq_lengths=True,  # for pipeline stages
        moe_token_dispatcher_type="alltoall",  # required with variable_seq_lengths, also for dense models
        tensor_model_parallel_size=values["tensor_model_parallel_size"],
        pipeline_model_parallel_size=values["pipeline_model_parallel_size"],
        **(recompute if values["recompute"] else {}),
    )  # fmt: skip


def optimizer(model: Any, values: dict[str, Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer=values["optimizer"], lr=values["lr"], weight_decay=values["weight_decay"], adam_beta1=0.9,
        adam_beta2=0.999, adam_eps=1e-8, sgd_momentum=0.0, clip_grad=values["clip_grad"], bf16=values["bf16"],
        params_dtype=getattr(torch, values["params_dtype"]),
    )  # fmt: skip
    made = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    for group in (group for each in made.chained_optimizers for group in each.optimizer.param_groups):
        group["weight_decay"] = values["weight_decay"] * group["wd_mult"]  # as in Megatron; wd_mult is 0 for norms
    return made


class SdpaAttention(torch.nn.Module):
    """Megatron's `core_attention` with torch's SDPA. Rows are padded on the right, so a causal mask is sufficient."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return a tensor `(tokens, rows, heads * width)`. The inputs have shape `(tokens, rows, heads, width)`."""
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return output.permute(2, 0, 1, 3).flatten(2)


class _CudaIsCpu(TorchFunctionMode):
    """Creates tensors on the CPU where Megatron's code requests CUDA tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        return func(*args, **(kwargs | {"device": "cpu"} if kwargs.get("device") == "cuda" else kwargs))


@contextmanager
def on_cpu() -> Iterator[None]:
    """Run Megatron on a CPU inside this context, for tests. Megatron normally requests CUDA tensors."""
    answers = {"current_device": torch.device("cpu"), "synchronize": None, "current_stream": None}
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        stack.enter_context(_CudaIsCpu())
        yield


# --- weights ----------------------------------------------------------------------------------------------------------

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
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")  # matrices that are divided by columns


def sources(name: str, first_layer: int = 0, tied: bool = False) -> list[str]:
    """Return the names of the Hugging Face matrices that one Megatron parameter contains.

    Args:
        name: Name of the Megatron parameter. Its layer number starts at 0 in each pipeline stage.
        first_layer: Number of the first layer of this pipeline stage in the model.
        tied: Whether output head and embedding share one weight. The last stage then has a copy of this weight.
    """
    if match := _LAYER.fullmatch(name):
        return [f"model.layers.{int(match[1]) + first_layer}.{part}" for part in _IN_LAYER[match[2]]]
    return [_OUTSIDE["embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name]]


def share_of(name: str, parts: Sequence[Tensor], groups: int, rank: int, ranks: int) -> Tensor:
    """Return the part of a Megatron parameter on the tensor-parallel rank `rank`, built from Hugging Face matrices.

    `groups` is the number of key heads. `supported` checks that the ranks can divide the parameter evenly.
    """
    if name.endswith("norm.weight"):
        return parts[0]
    if name.endswith("linear_qkv.weight"):
        parts = [torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)]
    dim = 1 if name.endswith(_COLUMNS) else 0
    return torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)


def joined(name: str, shares: Sequence[Tensor], groups: int, query_rows: int) -> list[Tensor]:
    """Return the Hugging Face matrices of a Megatron parameter, given its parts on all tensor-parallel ranks.

    `query_rows` is the number of rows of the query matrix. This function is the inverse of `share_of`.
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
def fill(
    parameters: Mapping[str, Tensor], get: Callable[[str], Tensor], first_layer: int, tied: bool, groups: int,
    rank: int, ranks: int,
) -> None:  # fmt: skip
    """Copy Hugging Face tensors to Megatron's parameters. `get` returns a tensor by name. Raise ValueError for a tensor
    with a wrong shape."""
    for name, parameter in parameters.items():
        values = share_of(name, [get(each) for each in sources(name, first_layer, tied)], groups, rank, ranks)
        if values.shape != parameter.shape:
            raise ValueError(f"{name} is {list(parameter.shape)}, but the checkpoint has {list(values.shape)}")
        parameter.copy_(values)
