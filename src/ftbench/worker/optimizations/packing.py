"""Isolate the samples of a row from each other. The collator builds rows with several samples for `packing` and
`padding_free` (batches without padding).

transformers finds the samples of a row from positions that start again at 0, and builds attention masks from these
positions. Two models need changes. For gpt-oss, transformers 5.17 builds masks without positions: samples would attend
to earlier samples. Qwen2.5-VL needs four position tensors: three for the rotary embedding, and one for the masks.
"""

from typing import Any

from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import GPT_OSS
from ftbench.worker.model.parts import base_model, decoder

_MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


def apply(model: Any, spec: Experiment) -> None:
    """Make gpt-oss and Qwen2.5-VL build their masks from positions.

    Raises:
        SpecError: The model has linear attention. Its state would pass from one sample to the next.
    """
    name = "packing" if spec.optimizations.packing else "padding_free"
    base = base_model(model)
    if "linear_attention" in (getattr(base.config.get_text_config(), "layer_types", None) or ()):
        raise SpecError(
            f"optimizations.{name}: {type(base).__name__} has layers of linear attention, in which the samples "
            "of a row would affect each other: set it to off"
        )
    if base.config.get_text_config().model_type == GPT_OSS:
        decoder(model).register_forward_pre_hook(_with_masks, with_kwargs=True)
    if base.config.model_type == "qwen2_5_vl":
        decoder(model).register_forward_pre_hook(_with_both_positions, with_kwargs=True)


def _with_both_positions(decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Expand position_ids (batch, length) to (4, batch, length): one copy for the masks, and three for M-RoPE."""
    positions = kwargs.get("position_ids")
    if positions is None or positions.ndim != 2:
        return None
    return args, kwargs | {"position_ids": positions.expand(4, *positions.shape)}


def _with_masks(decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is not None:
        return None
    shape = decoder.embed_tokens.weight.new_empty((*positions.shape, 1))  # only its shape, dtype and device matter
    inputs = {"config": decoder.config, "inputs_embeds": shape, "attention_mask": None, "past_key_values": None}
    masks = {name: make(**inputs, position_ids=positions) for name, make in _MASKS.items()}
    return args, kwargs | {"attention_mask": masks}
