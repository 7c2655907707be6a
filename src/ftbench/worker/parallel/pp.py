"""Pipeline parallelism with torch's schedules. DDP, FSDP2 and transformers' tensor parallelism can be added.

Each GPU holds some of the layers. The steps of a rank are: load the weights of its layers, add the adapters, remove the
other layers (`cut`), shard or copy its stages, and create the schedule. Before `cut`, the model has all layers, and the
layers of other ranks are on the meta device. So adapters have the same names and initial values as in a run on one GPU.
"""

import copy
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ftbench.core import pipeline
from ftbench.errors import SpecError
from ftbench.families import describe
from ftbench.spec.experiment import Experiment, Launch
from ftbench.spec.strategies import PIPELINED
from ftbench.worker import parallel
from ftbench.worker.device import device
from ftbench.worker.measure.batch_count import COUNT
from ftbench.worker.model.loading import skeleton
from ftbench.worker.model.parts import Placeholder, base_model, decoder, decoder_layers
from ftbench.worker.model.random_weights import RandomStateDict
from ftbench.worker.parallel import ep, tp
from ftbench.worker.parallel.ddp import different_copies
from ftbench.worker.parallel.stages import KEY, Pipeline


@cache
def mesh_of(launch: Launch) -> Any:
    """Return the device mesh. accelerate needs consecutive ranks for the same batch, so `dp` is the first dimension."""
    sizes = (launch.data_parallel_size, launch.pp or 1, launch.tp or 1)
    return init_device_mesh(device().type, sizes, mesh_dim_names=("dp", "pp", "tp"))


def reads(spec: Experiment) -> bool:
    """Return whether this rank reads weight files. If not, it creates random weights in memory."""
    return spec.model.weights == "pretrained" or spec.launch.tp is not None or spec.method.quantised


def split_of(spec: Experiment, config: Any) -> tuple[int, ...]:
    """Return the number of layers of each stage. Raise SpecError for a model that pp does not support."""
    text = config.get_text_config()
    if text.model_type not in PIPELINED:
        raise SpecError(
            f"launch.strategy: pp supports {', '.join(PIPELINED)}, and {spec.model.id} is {text.model_type}"
        )
    ep.require_even(spec, config)
    return spec.launch.split or describe(text.to_dict()).split(spec.launch.stages)


def own_layers(spec: Experiment, split: tuple[int, ...]) -> tuple[list[int], bool, bool]:
    """Return the indices of this rank's layers, whether it has the embedding, and whether it has the head."""
    indices = pipeline.of_rank(spec.launch.schedule, spec.launch.pp or 1, mesh_of(spec.launch)["pp"].get_local_rank())
    return pipeline.bounds(split, indices)


def read(kind: Any, source: str, config: Any, spec: Experiment, arguments: dict[str, Any]) -> Any:
    """Return the model. The layers of this rank have values, and the other layers are on the meta device."""
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
        values = RandomStateDict(model.state_dict(), spec.model)
        target = torch.device("cpu") if "fsdp" in spec.launch.strategy else device()
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                parameter.data = values[name].to(target)
        del values
        torch.cuda.empty_cache()  # frees shards of other ranks' layers, which were also initialized on the GPU
    return model


def _placement(spec: Experiment, config: Any) -> dict[str, Any]:
    """Return the arguments of from_pretrained that place the weights on devices. FSDP places them later."""
    launch = spec.launch
    if launch.tp is None:
        return {} if "fsdp" in launch.strategy or device().type == "cpu" else {"device_map": {"": device()}}
    return tp.on_mesh(spec, config, lambda: mesh_of(launch))


def _pretrained(kind: Any, source: str, config: Any, layers: list[int], arguments: dict[str, Any]) -> Any:
    """Load the model from files, without reading the layers of other ranks. The constructor of a subclass removes
    these layers before from_pretrained loads the weights. After loading, they are added again, without values."""
    plain = kind._model_mapping[type(config)]
    removed: dict[str, Any] = {}

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)
        modules = decoder(self).layers._modules
        removed.update({name: modules.pop(name) for name in [*modules] if int(name) not in layers})

    cut_class: Any = type(plain.__name__, (plain,), {"__init__": build, "__module__": plain.__module__})
    cut_class._keys_to_ignore_on_load_unexpected = [r"\.layers\.\d+\."]
    model = cut_class.from_pretrained(source, **arguments)
    model.__class__ = plain
    modules = decoder(model).layers._modules
    all_layers = {**modules, **removed}
    modules.clear()
    modules.update({str(at): all_layers[str(at)] for at in range(len(all_layers))})
    return model


def without_values(parameter: Any, example: Any) -> Any:
    """Return a parameter on the meta device, with the shape and dtype of `example`. If `example` is a 4-bit weight,
    copy its quantization state."""
    empty = torch.empty(example.shape, dtype=example.dtype, device="meta")
    made = nn.Parameter(empty, parameter.requires_grad and empty.is_floating_point())
    if (state := getattr(example, "quant_state", None)) is not None:
        made.quant_state = state
    return made


def _forget(model: Any, modules: list[Any]) -> None:
    """Move all parameters to the meta device, except the parameters of `modules`."""
    kept = {id(parameter) for module in modules for parameter in module.parameters()}
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in kept:
                moved.setdefault(id(parameter), without_values(parameter, parameter))
                module._parameters[name] = moved[id(parameter)]


def _as_quantised(layers: Any, own_layer: int) -> None:
    """Give the layers of other ranks 4-bit parameters without values, like those of this rank's layer `own_layer`.
    bitsandbytes converts only loaded weights."""
    for name, example in layers[own_layer].named_parameters():
        for layer in layers:
            path, _, last = name.rpartition(".")
            if (parameters := layer.get_submodule(path)._parameters)[last].is_meta:
                parameters[last] = without_values(example, example)


# --- after loading ---------------------------------------------------------------------------------------------------


def cut(model: Any, spec: Experiment) -> Any:
    """Return the model with this rank's layers only, and attach its pipeline. Store a copy of the model with all
    layers, on the meta device, in the model's attribute COMPLETE."""
    split = split_of(spec, model.config)
    layers, first, last = own_layers(spec, split)
    base, inner = base_model(model), decoder(model)
    tied = inner.embed_tokens.weight is base.get_output_embeddings().weight
    complete = _without_values(model)
    narrow = "fsdp" in spec.launch.strategy and spec.train.precision == "bf16"
    dtype = torch.bfloat16 if narrow else inner.embed_tokens.weight.dtype
    for at in range(len(inner.layers)):
        if at not in layers:
            inner.layers._modules[str(at)] = Placeholder()
    if not first:
        inner.embed_tokens = Placeholder()
    if not last:
        inner.norm = Placeholder()
        base.set_output_embeddings(Placeholder())
    base.config.tie_word_embeddings = tied
    base._tp_size = spec.launch.tp and spec.launch.gpus // spec.launch.data_parallel_size  # ranks with the same batch
    model.__dict__[KEY] = Pipeline(model, spec, split, mesh_of(spec.launch), dtype)  # not as a submodule
    model.__dict__[parallel.COMPLETE] = complete
    return model


def _without_values(model: Any) -> Any:
    """Return a copy of a model on the meta device, which has shapes but no values."""
    made = copy.deepcopy(model, {id(each): without_values(each, each) for each in model.parameters()})
    made.config.distributed_config = None  # saving would wait for other ranks
    return made


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return the arguments of the trainer. accelerate gives `tp_size` consecutive ranks the same dataset rows."""
    same = spec.launch.gpus // spec.launch.data_parallel_size
    sizes = {"dp_shard_size": spec.launch.data_parallel_size} if spec.launch.data_parallel_size > 1 else {}
    return ep.arguments(spec) | {"parallelism_config": ParallelismConfig(tp_size=same, **sizes)}


def attach(trainer: Any, spec: Experiment) -> None:
    """Make the trainer use the pipeline for training, evaluation, gradient clipping and saving."""
    stages: Pipeline = Pipeline.of(trainer.model)
    accelerator = trainer.accelerator
    accelerator._prepare_tp = lambda *objects: objects

    def prepare_model(model: Any, **_: Any) -> Any:
        accelerator._models.append(model)
        return model

    def training_step(model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        count = inputs.pop(COUNT)
        trainer.batches.add((tuple(inputs["input_ids"].shape), count.padded > count.real))
        loss = stages.train(trainer._prepare_inputs(inputs), num_items_in_batch / spec.launch.data_parallel_size)
        if accelerator.sync_gradients:
            stages.finish_gradients()
        return loss

    def prediction_step(model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> tuple[torch.Tensor, None, None]:
        count = inputs.pop(COUNT)
        return stages.evaluate(trainer._prepare_inputs(inputs), max(1, count.labels)), None, None

    def clip(parameters: Any, most: float, *_: Any, **__: Any) -> torch.Tensor:
        parameters = [*parameters]
        norm = stages.norm(parameters)
        if most < float("inf"):
            nn.utils.clip_grads_with_norm_(parameters, most, norm, foreach=False)
        return norm

    accelerator.prepare_model, accelerator.clip_grad_norm_ = prepare_model, clip
    trainer.training_step, trainer.prediction_step = training_step, prediction_step
    trainer._clip_grad_norm = lambda model: clip(model.parameters(), trainer.args.max_grad_norm)
    trainer.save_model = lambda folder: _save(trainer, folder)
    if spec.launch.tp:
        stages.partial += tp.norms_within_heads(trainer.model)  # their gradients are summed once per step
    ep.split_groups(trainer)


def _save(trainer: Any, folder: str) -> None:
    """Gather the trained weights of all stages on rank 0 and save them as one model."""
    stages: Pipeline = Pipeline.of(trainer.model)
    stages.shard()
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    distinct = {name: p.detach() for name, p in trained.items() if p is not stages.copy}
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in distinct.items()}
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    has_share = stages.mesh["dp"].get_local_rank() == stages.mesh["tp"].get_local_rank() == 0
    dist.gather_object({name: p.cpu() for name, p in full.items()} if has_share else {}, gathered)
    if gathered is not None:
        state = {name: p for part in gathered for name, p in part.items()}
        model, trainer.model = trainer.model, parallel.complete(trainer.model)
        trainer._save(folder, state_dict=state)
        trainer.model = model


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return error messages after a step: wrong layers, missing passes, unsharded weights, or copies that differ."""
    stages: Pipeline = Pipeline.of(trainer.model)
    problems, launch = [], spec.launch
    wanted = sum(stages.split[index] for index in stages.indices)
    if (held := len(decoder_layers(trainer.model))) != wanted:
        problems.append(f"launch.strategy is {launch.strategy}, but this rank has {held} layers, not {wanted}")
    if any(layers.passed != launch.micro_batches for layers in stages.layers):
        problems.append(f"launch.micro_batches is {launch.micro_batches}, but a stage has not computed all of them")
    sharded = [isinstance(parameter, DTensor) for parameter in trainer.model.parameters()]
    if ("fsdp" in launch.strategy and not all(sharded)) or ("tp" in launch.strategy.split("+") and not any(sharded)):
        problems.append(f"launch.strategy is {launch.strategy}, but parameters are not sharded")
    if "ddp" in launch.strategy and different_copies(trainer.model, stages.mesh["dp"].get_group()):
        problems.append(f"launch.strategy is {launch.strategy}, but the copies of a stage differ after step 1")
    return problems


def applied(trainer: Any) -> dict[str, Any]:
    """Return this rank's stages and number of elements, and the median times of the latest passes."""
    stages: Pipeline = Pipeline.of(trainer.model)
    stages.shard()
    parameters = list(trainer.model.parameters())
    return {
        "schedule": stages.launch.schedule,
        "micro_batches": stages.launch.micro_batches,
        "split": list(stages.split),
        "stages": stages.indices,
        "elements_of_rank": sum(getattr(each, "_local_tensor", each).numel() for each in parameters),
        **stages.seconds(),
    }
