"""Pipeline parallelism with torch's schedules, and with DDP, FSDP2 and transformers' tensor parallelism.

Each GPU holds some of the layers. The parts are applied in this order: load the weights of the own layers, add the
adapters, cut the model, shard or copy its stages, and make the schedule. Until it is cut, a model has all its layers.
The layers of other GPUs have no values. So adapters get the names and the initial values of a run on one GPU.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.tensor import DTensor

from ftbench.spec.experiment import Experiment
from ftbench.worker import parallel
from ftbench.worker.measure.batch_count import COUNT
from ftbench.worker.model.parts import Elsewhere, base_model, decoder, decoder_layers
from ftbench.worker.parallel import ep
from ftbench.worker.parallel.pp_loading import mesh_of, own_layers, read, reads, split_of, without_values
from ftbench.worker.parallel.stages import Pipeline

__all__ = ["applied", "arguments", "attach", "cut", "read", "reads", "verify"]


def cut(model: Any, spec: Experiment) -> Any:
    """Return the model with this rank's layers only, and its pipeline. A copy without values keeps all layers."""
    split = split_of(spec, model.config)
    layers, first, last = own_layers(spec, split)
    base, inner = base_model(model), decoder(model)
    tied = inner.embed_tokens.weight is base.get_output_embeddings().weight
    complete = _without_values(model)
    narrow = "fsdp" in spec.launch.strategy and spec.train.precision == "bf16"
    dtype = torch.bfloat16 if narrow else inner.embed_tokens.weight.dtype
    for at in range(len(inner.layers)):
        if at not in layers:
            inner.layers._modules[str(at)] = Elsewhere()
    if not first:
        inner.embed_tokens = Elsewhere()
    if not last:
        inner.norm = Elsewhere()
        base.set_output_embeddings(Elsewhere())
    base.config.tie_word_embeddings = tied
    base._tp_size = spec.launch.tp and spec.launch.ranks // spec.launch.shares  # ranks with the same batch
    Pipeline(model, spec, split, mesh_of(spec), dtype).attach(model)
    model.__dict__[parallel.COMPLETE] = complete  # not as a submodule
    return model


def _without_values(model: Any) -> Any:
    """Return a copy of a model on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = without_values(parameter, parameter)
    made = copy.deepcopy(model, memo)
    made.config.distributed_config = None  # saving would wait for other ranks
    return made


def arguments(spec: Experiment) -> dict[str, Any]:
    """Return the arguments of the trainer. accelerate gives all ranks of a batch the same rows, as with tp."""
    same = spec.launch.ranks // spec.launch.shares
    sizes = {"dp_shard_size": spec.launch.shares} if spec.launch.shares > 1 else {}
    return ep.arguments(spec) | {"parallelism_config": ParallelismConfig(tp_size=same, **sizes)}


def attach(trainer: Any, spec: Experiment) -> None:
    """Make the trainer use the pipeline for its passes, the norm of the gradients, and saving."""
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
        loss = stages.train(trainer._prepare_inputs(inputs), num_items_in_batch / spec.launch.shares)
        if accelerator.sync_gradients:
            stages.finish_gradients()
        return loss

    def prediction_step(model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> tuple[torch.Tensor, None, None]:
        count = inputs.pop(COUNT)
        return stages.evaluate(trainer._prepare_inputs(inputs), max(1, count.labels)), None, None

    def clip(parameters: Any, most: float, *_: Any, **__: Any) -> torch.Tensor:
        parameters = [*parameters]
        norm = stages.norm(parameters)
        factor = (most / (norm + 1e-6)).clamp(max=1.0)
        if most < float("inf"):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return norm

    accelerator.prepare_model, accelerator.clip_grad_norm_ = prepare_model, clip
    trainer.training_step, trainer.prediction_step = training_step, prediction_step
    trainer._clip_grad_norm = lambda model: clip(model.parameters(), trainer.args.max_grad_norm)
    trainer.save_model = lambda folder: _save(trainer, folder)
    if spec.launch.tp:
        _sum_over_tensor_ranks(trainer, stages)
    ep.split_groups(trainer)


def _sum_over_tensor_ranks(trainer: Any, stages: Pipeline) -> None:
    """Sum the gradients of norms within heads once per step. transformers' hook would sum earlier micro-batches
    again."""
    for module in trainer.model.modules():
        for key, hook in [*module._backward_hooks.items()]:
            if getattr(hook, "__name__", "") == "_all_reduce_grads":
                del module._backward_hooks[key]
                stages.partial += [each for each in module.parameters(recurse=False) if each.requires_grad]


def _save(trainer: Any, folder: str) -> None:
    """Gather the trained weights of all stages on rank 0 and save them as one model."""
    stages: Pipeline = Pipeline.of(trainer.model)
    stages.shard()
    named = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}
    own = {name: each.detach() for name, each in named.items() if each is not stages.copy}
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in own.items()}
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    has_share = stages.mesh["dp"].get_local_rank() == stages.mesh["tp"].get_local_rank() == 0
    dist.gather_object({name: each.cpu() for name, each in whole.items()} if has_share else {}, gathered)
    if gathered is not None:
        state = {name: each for part in gathered for name, each in part.items()}
        model, trainer.model = trainer.model, parallel.complete(trainer.model)
        trainer._save(folder, state_dict=state)
        trainer.model = model


def verify(trainer: Any, spec: Experiment) -> list[str]:
    """Return the problems after a step: layers of other ranks, missing passes, or copies with different weights."""
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
    if "ddp" in launch.strategy:
        sums = torch.stack([each.detach().double().sum() for each in trainer.model.parameters() if each.requires_grad])
        others = [torch.empty_like(sums) for _ in range(launch.shares)]
        dist.all_gather(others, sums, stages.mesh["dp"].get_group())
        if any(not torch.equal(other, sums) for other in others):
            problems.append(f"launch.strategy is {launch.strategy}, but the copies of a stage differ after step 1")
    return problems


def applied(trainer: Any) -> dict[str, Any]:
    """Return the stages of this rank, their layers and elements, and the time of a pass so far."""
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
