"""A spec's model → loaded weights and tokenizer, published or random, through the same from_pretrained."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ftbench.errors import MissingError, SpecError
from ftbench.spec.experiment import Experiment, Model
from ftbench.worker.random_weights import materialise


def source_of(model: Model) -> str:
    """What from_pretrained is given: a directory, or an id on the hub."""
    if model.weights == "random":
        return str(materialise(model))
    return model.path or model.id


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def load_config(model: Model, source: str) -> Any:
    """The model's configuration. Raises MissingError where it cannot be reached."""
    return _reach(model, lambda: AutoConfig.from_pretrained(source, **_hub(model)))


def load_tokenizer(model: Model, source: str) -> Any:
    """The model's tokenizer, with a padding token."""
    tokenizer = _reach(model, lambda: AutoTokenizer.from_pretrained(source, **_hub(model)))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(spec: Experiment, source: str, quantization_config: Any = None) -> Any:
    """The weights on the device, in the spec's dtype and with its attention implementation."""
    attention = spec.optimizations.attention
    arguments: dict[str, Any] = {"dtype": getattr(torch, spec.model.dtype), **_hub(spec.model)}
    if attention != "auto":
        arguments["attn_implementation"] = attention
    if quantization_config is not None:
        arguments["quantization_config"] = quantization_config
    if device().type == "cuda":
        arguments["device_map"] = {"": device()}
    return _reach(spec.model, lambda: AutoModelForCausalLM.from_pretrained(source, **arguments))


def _hub(model: Model) -> dict[str, Any]:
    if model.path or model.weights == "random":
        return {"local_files_only": True, "trust_remote_code": model.trust_remote_code}
    return {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}


def _reach(model: Model, load: Any) -> Any:
    """Turns the ways in which a model cannot be reached or used into a sentence. What else goes wrong goes on up:
    running out of memory is a result, not a missing model."""
    try:
        return load()
    except (OSError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MissingError(
            f"model {model.path or model.id} cannot be loaded: {first} Check the name, give model.path, log in or go "
            "online once, or set model.weights=random to measure the same shape without a download"
        ) from None
    except ValueError as error:
        raise SpecError(f"model {model.path or model.id}: {str(error).strip().splitlines()[0]}") from None
