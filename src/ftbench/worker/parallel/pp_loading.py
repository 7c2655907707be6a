"""Load the layers of one rank of a pipeline. The others stay on the meta device, so that adapters of all layers get the
names and the initial values of a run on one GPU."""

from functools import cache
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed import DistributedConfig

from ftbench.core import pipeline
from ftbench.errors import SpecError
from ftbench.families import describe
from ftbench.spec.experiment import Experiment
from ftbench.spec.strategies import PIPELINED, split_problems
from ftbench.worker.device import device
from ftbench.worker.model.loading import skeleton
from ftbench.worker.model.parts import decoder
from ftbench.worker.model.random_weights import Drawn
from ftbench.worker.parallel import tp


@cache
def _mesh(shares: int, stages: int, tensor: int) -> Any:
    """Return the mesh of all ranks. The ranks of one batch are neighbours, as accelerate expects."""
    return init_device_mesh(device().type, (shares, stages, tensor), mesh_dim_names=("dp", "pp", "tp"))


def mesh_of(spec: Experiment) -> Any:
    return _mesh(spec.launch.shares, spec.launch.pp, spec.launch.tp or 1)


def reads(spec: Experiment) -> bool:
    """Return whether this rank reads weight files. Random weights need no files, unless transformers divides them over
    ranks."""
    return spec.model.weights == "pretrained" or spec.launch.tp is not None or spec.method.quantised


def split_of(spec: Experiment, config: Any) -> tuple[int, ...]:
    """Return the number of layers of each stage. Raise SpecError for a model that pp does not support."""
    text = config.get_text_config()
    if text.model_type not in PIPELINED:
        raise SpecError(
            f"launch.strategy: pp supports {', '.join(PIPELINED)}, and {spec.model.id} is {text.model_type}"
        )
    if problems := [*split_problems(spec, text.num_hidden_layers)]:
        raise SpecError("; ".join(problems))
    return spec.launch.split or describe(text.to_dict()).split(spec.launch.stages)


def own_layers(spec: Experiment, split: tuple[int, ...]) -> tuple[list[int], bool, bool]:
    """Return the layers of this rank, and whether it has the embedding and the head."""
    indices = pipeline.of_rank(spec.launch.schedule, spec.launch.pp or 1, mesh_of(spec)["pp"].get_local_rank())
    return pipeline.bounds(split, indices)


def read(kind: Any, source: str, config: Any, spec: Experiment, arguments: dict[str, Any]) -> Any:
    """Return the model with the values of this rank's layers. The other layers are on the meta device."""
    layers, first, last = own_layers(spec, split_of(spec, config))
    if reads(spec):
        model = _pretrained(kind, source, config, layers, arguments | _placement(spec, config))
    else:
        model = skeleton(kind, config, spec)
    inner = decoder(model)
    parts = [layer for at, layer in enumerate(inner.layers) if at in layers]
    parts += [inner.embed_tokens] if first else []
    parts += [inner.norm, model.get_output_embeddings()] if last else []
    _forget(model, parts)
    if spec.method.quantised:
        _as_quantised(inner.layers, layers[0])
    if not reads(spec):
        values = Drawn(model.state_dict(), spec.model)
        target = torch.device("cpu") if "fsdp" in spec.launch.strategy else device()
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                parameter.data = values[name].to(target)
        del values
        torch.cuda.empty_cache()  # shards drawn on the GPU hold other layers too
    return model


def _placement(spec: Experiment, config: Any) -> dict[str, Any]:
    """Return the arguments that place the weights. FSDP moves them when it shards them."""
    launch = spec.launch
    if launch.tp is None:
        return {} if "fsdp" in launch.strategy or device().type == "cpu" else {"device_map": {"": device()}}
    tp.require_even(spec, config, "launch.tp", launch.tp)
    tp.require_shared_adapters(spec)
    LoraLayer._get_in_out_features = lambda self, module: (module.in_features, module.out_features)  # see tp_fsdp
    sizes = DistributedConfig(tp_size=launch.tp, fsdp_size=launch.ranks // launch.tp)
    return {"distributed_config": sizes, "device_mesh": mesh_of(spec)}


def _pretrained(kind: Any, source: str, config: Any, layers: list[int], arguments: dict[str, Any]) -> Any:
    """Return the model from files, without reading the layers of other ranks.

    from_pretrained gets a class whose models lack them. They are added again afterwards."""
    plain = kind._model_mapping[type(config)]
    away: dict[str, Any] = {}

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)
        there = decoder(self).layers._modules
        away.update({name: there.pop(name) for name in [*there] if int(name) not in layers})

    cut_class: Any = type(plain.__name__, (plain,), {"__init__": build, "__module__": plain.__module__})
    cut_class._keys_to_ignore_on_load_unexpected = [r"\.layers\.\d+\."]
    model = cut_class.from_pretrained(source, **arguments)
    model.__class__ = plain
    there = decoder(model).layers._modules
    every = {**there, **away}
    there.clear()
    there.update({str(at): every[str(at)] for at in range(len(every))})
    return model


def without_values(parameter: Any, example: Any) -> Any:
    """Return a parameter without values. 4-bit weights get the shape and the scales' description of an example."""
    empty = torch.empty(example.shape, dtype=example.dtype, device="meta")
    made = nn.Parameter(empty, parameter.requires_grad and empty.is_floating_point())
    if (state := getattr(example, "quant_state", None)) is not None:
        made.quant_state = state
    return made


def _forget(model: Any, modules: list[Any]) -> None:
    """Move the parameters outside these modules to the meta device."""
    kept = {id(parameter) for module in modules for parameter in module.parameters()}
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept:
                moved.setdefault(id(parameter), without_values(parameter, parameter))
                module._parameters[name] = moved[id(parameter)]


def _as_quantised(layers: Any, own: int) -> None:
    """Describe the layers of other ranks as 4-bit layers, like the layers of this rank. Their weights were not
    quantised here."""
    for name, example in layers[own].named_parameters():
        for layer in layers:
            path, _, last = name.rpartition(".")
            if (parameters := layer.get_submodule(path)._parameters)[last].is_meta:
                parameters[last] = without_values(example, example)
