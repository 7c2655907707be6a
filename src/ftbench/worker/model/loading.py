"""Load the model and the tokenizer of a spec with from_pretrained. The weights are published or random."""

from contextlib import nullcontext
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, Mxfp4Config, ProcessorMixin

from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.spec.experiment import Experiment, Model
from ftbench.spec.methods import GPT_OSS, family
from ftbench.store.machine import cache_dir
from ftbench.worker import parallel
from ftbench.worker.data.images import Pixels
from ftbench.worker.device import device
from ftbench.worker.model import nf4, vision
from ftbench.worker.model.random_weights import configuration, materialise
from ftbench.worker.optimizations import weight_offload
from ftbench.worker.optimizations.attention import VARLEN, register


def source_of(model: Model, method: Any = None, drawn: bool = False, packed: bool = False) -> str:
    """Return the argument of from_pretrained: a directory or a hub id. Random weights are written to files first.

    In two cases no weight files are written: the method creates MXFP4 experts in memory (61 GiB for gpt-oss-120b), or
    the ranks create random weights while they shard the model (`drawn`). With `packed`, the files are in NF4. unsloth
    always gets files in the published format.
    """
    if model.weights == "random":
        mxfp4 = method is not None and method.mxfp4
        layout = "mxfp4" if family(model) == GPT_OSS and (mxfp4 or getattr(method, "name", "") == "unsloth") else None
        layout = nf4.LAYOUT if packed else layout
        return str(materialise(model, layout, weights=not mxfp4 and not drawn))
    return model.path or model.id


def are_packed(spec: Experiment) -> bool:
    """Return whether the random weights are written to NF4 files."""
    return spec.model.weights == "random" and nf4.suits(spec, configuration(spec.model))


def are_drawn(spec: Experiment) -> bool:
    """Return whether the ranks create random weights while they shard the model, instead of reading files."""
    strategy: Any = parallel.load(spec.launch.strategy) if spec.launch.gpus > 1 else None
    return spec.model.weights == "random" and hasattr(strategy, "reads") and not strategy.reads(spec)


def load_config(model: Model, source: str) -> Any:
    """Return the model's configuration. Raise MissingError if it cannot be loaded."""
    return reach_description(model, lambda: AutoConfig.from_pretrained(source, **hub_arguments(model)))


def load_tokenizer(model: Model, source: str) -> Any:
    """Return the model's tokenizer. Use the end-of-sequence token for padding if there is no padding token."""
    tokenizer = reach_description(model, lambda: AutoTokenizer.from_pretrained(source, **hub_arguments(model)))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_pixels(spec: Experiment, source: str, config: Any, tokenizer: Any) -> Pixels | None:
    """Return the image processor of a vision model, otherwise None. Add a missing chat template to `tokenizer`."""
    model, longest = spec.model, int(spec.optimizations.image_size)
    if not vision.reads_images(config):
        return None
    kind = vision.processor_class(config.model_type)
    processor = reach_description(model, lambda: kind.from_pretrained(source, **hub_arguments(model)))
    if not tokenizer.chat_template:
        described = reach_description(model, lambda: ProcessorMixin.get_processor_dict(source, **hub_arguments(model)))
        tokenizer.chat_template = described[0].get("chat_template")
    tokenizer.takes_parts = True
    if longest and hasattr(processor, "image_grid_pinpoints"):
        processor.image_grid_pinpoints = vision.limited_pinpoints(config, longest)
    cache = cache_dir() / "images" if spec.optimizations.image_cache else None
    return Pixels(vision.shape_of(config, processor), config.image_token_id, processor, longest, cache)


def load_model(spec: Experiment, source: str, quantization_config: Any = None) -> Any:
    """Load and return the model. Published MXFP4 weights are loaded in 16 bits, without `quantization_config`."""
    quantised = _quantised(spec, source) or quantization_config
    return read(spec, source, **({} if quantised is None else {"quantization_config": quantised}))


def read(spec: Experiment, source: str, **more: Any) -> Any:
    """Load and return the model. `more` are arguments of from_pretrained. Sharded or offloaded weights stay on the
    host."""
    arguments = {"dtype": getattr(torch, spec.model.dtype), **hub_arguments(spec.model), **attention_of(spec), **more}
    offload = spec.optimizations.weight_offload
    if device().type == "cuda" and not spec.launch.sharded:
        arguments["device_map"] = {"": torch.device("cpu") if offload else device()}
    strategy: Any = parallel.load(spec.launch.strategy) if spec.launch.gpus > 1 else None
    if hasattr(strategy, "loading"):
        arguments |= strategy.loading(spec, load_config(spec.model, source))
    config = more.get("config") or load_config(spec.model, source)
    if vision.reads_images(config) and "attn_implementation" in arguments:  # the image encoder keeps its default
        arguments["attn_implementation"] = {"text_config": arguments["attn_implementation"]}
    kind = vision.auto_class(config)
    if hasattr(strategy, "read"):
        return reach(spec.model, lambda: strategy.read(kind, source, config, spec, arguments))
    if hasattr(strategy, "reads") and not strategy.reads(spec):
        return reach(spec.model, lambda: skeleton(kind, config, spec))
    with weight_offload.quantised_on(device()) if offload and spec.method.quantised else nullcontext():
        model = reach(spec.model, lambda: kind.from_pretrained(source, **arguments))
    return weight_offload.keep_on_host(model, spec, device()) if offload else model


def trains_in_32_bits(spec: Experiment) -> bool:
    """Return whether sharded weights are trained in float32, with 16-bit matrix products. Only `full` does this.
    torchao's optimizers do not need float32 weights, because they round 16-bit weights stochastically."""
    full = spec.method.name == "full" and spec.train.precision != "fp32"
    return full and "torchao" not in spec.train.optimizer


def skeleton(kind: Any, config: Any, spec: Experiment) -> Any:
    """Return a model with uninitialized weights on the host. The weights take no memory until they get values during
    sharding, because the system allocates a page at the first write. With 16-bit products, weights of `full` are
    created in float32, because accelerate would convert them anyway. With pp, weights are converted later."""
    wide = trains_in_32_bits(spec) and not spec.launch.pp
    dtype = torch.float32 if wide else getattr(torch, spec.model.dtype)
    with torch.device("meta"):
        model = kind.from_config(config, dtype=dtype, **attention_of(spec))
    model.to_empty(device="cpu")
    model.tie_weights()
    for part in (*model.parameters(), *model.modules()):
        part._is_hf_initialized = isinstance(part, torch.nn.Parameter)
    model.initialize_weights()  # buffers that are not in the files
    return model.eval()


def attention_of(spec: Experiment) -> dict[str, str]:
    """Return the attention argument of from_pretrained. For `auto`, return no argument: transformers chooses."""
    attention = spec.optimizations.attention
    if attention == VARLEN:
        register()
    return {} if attention == "auto" else {"attn_implementation": attention}


def _quantised(spec: Experiment, source: str) -> Any:
    """Return the config that loads published MXFP4 weights in 16 bits. Return None for other weights. Raise SpecError
    if the method would quantise weights that are already published in a quantised format."""
    config = getattr(load_config(spec.model, source), "quantization_config", None)
    if config is None:
        return None
    kind = config.get("quant_method") if isinstance(config, dict) else config.quant_method
    if str(kind) == "bitsandbytes" and spec.model.weights == "random":
        return None  # from_pretrained uses the configuration in the files
    if spec.method.quantised:
        raise SpecError(
            f"method {spec.method.name}: the weights of {spec.model.id} are published in {kind} and cannot be "
            "quantised again: set method.quant_type to mxfp4 if it is gpt-oss, or use lora"
        )
    return Mxfp4Config(dequantize=True) if str(kind) == "mxfp4" else None


def hub_arguments(model: Model) -> dict[str, Any]:
    """Return the arguments of from_pretrained for the revision, remote code and local files of a model."""
    if model.path or model.weights == "random":
        return {"local_files_only": True, "trust_remote_code": model.trust_remote_code}
    arguments = {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}
    # code_revision also applies to code in a different repository. Loading fails if that repository lacks the commit.
    return arguments | ({"code_revision": model.revision} if model.trust_remote_code else {})


def reach(model: Model, load: Any) -> Any:
    """Call `load` and return its result. Raise MissingError or SpecError with a clear message if the call fails."""
    name = model.path or model.id
    try:
        return load()
    except ImportError as error:
        raise MissingError(f"model {model.id} needs a package that is not installed: {_line(error)}") from None
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
            f"model {name}: its weights are damaged ({kind}): download them again, or set model.weights=random"
        ) from None


def reach_description(model: Model, load: Any) -> Any:
    """Call `load` for a configuration, tokenizer or processor. Turn each error into SpecError or MissingError."""
    try:
        return reach(model, load)
    except (FtbenchError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - parsers of broken files raise anything
        raise SpecError(
            f"model {model.path or model.id}: its configuration, tokenizer or processor cannot be used "
            f"({type(error).__name__}: {_line(error)}): download the files again"
        ) from None


def _line(error: Exception, last: bool = False) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if last else 0].strip()
