"""A spec's model → loaded weights and tokenizer, published or random, through the same from_pretrained."""

from contextlib import nullcontext
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, Mxfp4Config, ProcessorMixin

from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.spec.experiment import Experiment, Model
from ftbench.store.machine import cache_dir
from ftbench.worker import parallel
from ftbench.worker.data.pixels import Pixels
from ftbench.worker.device import device
from ftbench.worker.model import vision
from ftbench.worker.model.random_weights import is_gpt_oss, materialise
from ftbench.worker.optimizations import weight_offload
from ftbench.worker.optimizations.attention import CUDNN, VARLEN, register


class UnreadModel(Protocol):
    """In place of what from_pretrained is given: a configuration, and a model of it whose weights were never read."""

    config: Any

    def load(self, arguments: dict[str, Any]) -> Any: ...
    def tokenizer(self) -> Any: ...
    def processor(self) -> Any: ...


Source = str | UnreadModel


def source_of(model: Model, method: Any = None, drawn: bool = False) -> str:
    """Return what from_pretrained is given: a directory, or an id on the hub. A method that keeps experts in MXFP4
    makes random weights in memory: of gpt-oss-120b they would be 61 GiB of files; so do ranks that shard them as they
    are `drawn`. unsloth finds files as published."""
    if model.weights == "random":
        kept = method is not None and method.mxfp4
        layout = "mxfp4" if is_gpt_oss(model) and (kept or getattr(method, "name", "") == "unsloth") else None
        return str(materialise(model, layout, weights=not kept and not drawn))
    return model.path or model.id


def are_drawn(spec: Experiment) -> bool:
    """Return whether the ranks of a run draw random weights while they shard them, and nobody reads them."""
    strategy: Any = parallel.load(spec.launch.strategy) if spec.launch.ranks > 1 else None
    return spec.model.weights == "random" and hasattr(strategy, "reads") and not strategy.reads(spec)


def load_config(model: Model, source: Source) -> Any:
    """Return the model's configuration. Raises MissingError where it cannot be reached."""
    if not isinstance(source, str):
        return source.config
    return reach_description(model, lambda: AutoConfig.from_pretrained(source, **hub_arguments(model)))


def load_tokenizer(model: Model, source: Source) -> Any:
    """Return the model's tokenizer, with a padding token."""
    if not isinstance(source, str):
        return source.tokenizer()
    tokenizer = reach_description(model, lambda: AutoTokenizer.from_pretrained(source, **hub_arguments(model)))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_pixels(spec: Experiment, source: Source, config: Any, tokenizer: Any) -> Pixels | None:
    """Return what processes a model's images; None for one that reads none. The chat template may be kept with the
    processor alone: then it is given to the tokenizer."""
    model, longest = spec.model, int(spec.optimizations.image_size)
    if not vision.reads_images(config):
        return None
    kind = vision.processor_class(config.model_type)
    processor = reach_description(
        model,
        lambda: kind.from_pretrained(source, **hub_arguments(model)) if isinstance(source, str) else source.processor(),
    )
    if not tokenizer.chat_template and isinstance(source, str):
        described = reach_description(model, lambda: ProcessorMixin.get_processor_dict(source, **hub_arguments(model)))
        tokenizer.chat_template = described[0].get("chat_template")
    if longest and hasattr(processor, "image_grid_pinpoints"):
        processor.image_grid_pinpoints = vision.limited_pinpoints(config, longest)
    cache = cache_dir() / "images" if spec.optimizations.image_cache and isinstance(source, str) else None
    return Pixels(vision.shape_of(config, processor), config.image_token_id, processor, longest, cache)


def load_model(spec: Experiment, source: Source, quantization_config: Any = None) -> Any:
    """Load the weights on the device, in the spec's dtype and with its attention implementation."""
    quantised = _quantised(spec, source) or quantization_config
    return read(spec, source, **({} if quantised is None else {"quantization_config": quantised}))


def read(spec: Experiment, source: Source, **more: Any) -> Any:
    """Call from_pretrained with what the spec says, and `more`: onto the device, or into the host's memory what no
    device will hold as a whole, or what is to wait there."""
    arguments = {"dtype": getattr(torch, spec.model.dtype), **hub_arguments(spec.model), **attention_of(spec), **more}
    waits = spec.optimizations.weight_offload
    if device().type == "cuda" and not spec.launch.sharded:
        arguments["device_map"] = {"": torch.device("cpu") if waits else device()}
    strategy: Any = parallel.load(spec.launch.strategy) if spec.launch.ranks > 1 else None
    if hasattr(strategy, "loading"):
        arguments |= strategy.loading(spec, load_config(spec.model, source))
    config = more.get("config") or load_config(spec.model, source)
    if vision.reads_images(config) and "attn_implementation" in arguments:  # the encoder's attention is not causal
        arguments["attn_implementation"] = {"text_config": arguments["attn_implementation"]}
    if not isinstance(source, str):
        return reach(spec.model, lambda: source.load(arguments))
    kind = vision.auto_class(config)
    if hasattr(strategy, "reads") and not strategy.reads(spec):
        return reach(spec.model, lambda: skeleton(kind, config, spec))
    with weight_offload.quantised_on(device()) if waits and spec.method.quantised else nullcontext():
        model = reach(spec.model, lambda: kind.from_pretrained(source, **arguments))
    return weight_offload.keep_on_host(model, spec, device()) if waits else model


def skeleton(kind: Any, config: Any, spec: Experiment) -> Any:
    """Return a model whose weights nobody has read, and which get their values as it is sharded: no more than its
    buffers is in memory, the host gives a page once somebody writes to it. What is trained beside 16-bit products is
    in 32 bits, as accelerate would make it."""
    full = spec.method.name == "full" and spec.train.precision != "fp32"
    dtype = torch.float32 if full else getattr(torch, spec.model.dtype)
    with torch.device("meta"):
        model = kind.from_config(config, dtype=dtype, **attention_of(spec))
    model.to_empty(device="cpu")
    model.tie_weights()
    for part in (*model.parameters(), *model.modules()):
        part._is_hf_initialized = isinstance(part, torch.nn.Parameter)
    model.initialize_weights()  # of what is in no file
    return model.eval()


def attention_of(spec: Experiment) -> dict[str, str]:
    """Return the attention implementation in transformers' words; nothing for its own choice."""
    attention = spec.optimizations.attention
    if attention in (VARLEN, CUDNN):
        register()
    return {} if attention == "auto" else {"attn_implementation": attention}


def _quantised(spec: Experiment, source: Source) -> Any:
    """Return how to load weights that were published quantised (gpt-oss: MXFP4): in 16 bits, so that they can be
    trained on. Raises SpecError for a method that would quantise them again."""
    config = getattr(load_config(spec.model, source), "quantization_config", None)
    if config is None:
        return None
    kind = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    if spec.method.quantised:
        raise SpecError(
            f"method {spec.method.name}: the weights of {spec.model.id} are published in {kind} and cannot be "
            "quantised again: set method.quant_type to mxfp4 if it is gpt-oss, or use lora"
        )
    return Mxfp4Config(dequantize=True) if str(kind) == "mxfp4" else None


def hub_arguments(model: Model) -> dict[str, Any]:
    """Return what from_pretrained is told about where a model comes from and what of it may run."""
    if model.path or model.weights == "random":
        return {"local_files_only": True, "trust_remote_code": model.trust_remote_code}
    arguments = {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}
    # The pin holds for code that a model takes from another repository too: there it names no commit, and fails.
    return arguments | ({"code_revision": model.revision} if model.trust_remote_code else {})


def reach(model: Model, load: Any) -> Any:
    """Turn the ways in which a model cannot be reached or used into a sentence. What else goes wrong goes on up:
    running out of memory is a result, not a missing model."""
    name = model.path or model.id
    try:
        return load()
    except ImportError as error:
        raise MissingError(f"model {model.id} needs a package that is not here: {_line(error)}") from None
    except OSError as error:
        raise MissingError(
            f"model {name} cannot be loaded: {_line(error)} Check the name, give model.path, log in or go "
            "online once, or set model.weights=random to measure the same shape without a download"
        ) from None
    except (ValueError, StrictDataclassError) as error:
        raise SpecError(f"model {name}: {_line(error, last=isinstance(error, StrictDataclassError))}") from None
    except (SafetensorError, UnpicklingError, EOFError) as error:
        kind = type(error).__name__
        raise MissingError(
            f"model {name}: its weights are damaged ({kind}): get them again, or set model.weights=random"
        ) from None


def reach_description(model: Model, load: Any) -> Any:
    """Call `load` as `reach` does, for files that describe a model: whatever a library says of these is their fault."""
    try:
        return reach(model, load)
    except (FtbenchError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - parsers of broken files raise anything
        raise SpecError(
            f"model {model.path or model.id}: its configuration, tokenizer or processor cannot be used "
            f"({type(error).__name__}: {_line(error)}): get the files again"
        ) from None


def _line(error: Exception, last: bool = False) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if last else 0].strip()
