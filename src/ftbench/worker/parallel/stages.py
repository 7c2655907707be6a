"""Run the stages of a pipeline. Each stage contains some of the layers. torch.distributed.pipelining sets the order of
the micro-batches. If several GPUs have a copy of a weight, this module sums the gradients of the copies."""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ftbench.core import pipeline
from ftbench.spec.experiment import Experiment
from ftbench.worker.device import device
from ftbench.worker.measure.meters import meters
from ftbench.worker.model.parts import Placeholder, base_model, decoder

_SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
KEY = "ftbench_pipeline"  # attribute of a model with stages
_TIMED = 64  # number of the latest passes from which the median times are computed
Batch = dict[str, Any]


class Layers(nn.Module):
    """The layers of one stage. The first stage also has the embedding. The last stage also has the norm, head and loss.

    Input and output are hidden states. The last stage returns the loss as a tensor with one element.
    """

    def __init__(self, model: Any, layers: range, stages: tuple[int, int], autocast: torch.dtype | None) -> None:
        super().__init__()
        base, inner, (index, total) = base_model(model), decoder(model), stages
        self.first, self.last, self.autocast = index == 0, index == total - 1, autocast
        head = [inner.norm, base.get_output_embeddings()] if self.last else []
        own = [layer for at, layer in enumerate(inner.layers) if at in layers]
        self.parts = nn.ModuleList([*([inner.embed_tokens] if self.first else []), *own, *head])
        view = nn.ModuleList(layer if at in layers else Placeholder() for at, layer in enumerate(inner.layers))
        self._model = (base, inner, {"layers": view, "norm": inner.norm if self.last else Placeholder()})
        self.batches: Sequence[Batch] = ()
        self.items: Any = None
        self.passed = 0

    def begin(self, batches: Sequence[Batch], items: Any) -> None:
        """Set the micro-batches of the next pass. The loss is divided by `items`, the number of label tokens."""
        self.batches, self.items, self.passed = batches, items, 0

    def forward(self, *hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of this stage for the next micro-batch: hidden states, or the loss in the last stage."""
        base, inner, view = self._model
        batch = dict(self.batches[self.passed])
        self.passed += 1
        labels = batch.pop("labels")
        if not self.first:
            batch = {key: value for key, value in batch.items() if key != "input_ids"} | {"inputs_embeds": hidden[0]}
        complete = {name: inner._modules[name] for name in view}  # a GPU with two stages has the layers of both
        inner._modules.update(view)
        try:
            return self._computed(base, inner, batch, labels)
        finally:
            inner._modules.update(complete)

    def _computed(self, base: Any, inner: Any, batch: Batch, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device().type, self.autocast) if self.autocast else nullcontext():
            if self.last:
                output = base(**batch, labels=labels, num_items_in_batch=self.items, use_cache=False)
                return output.loss.reshape(1)
            return inner(**batch, use_cache=False).last_hidden_state


class Stage(pipelining.PipelineStage):
    """A pipeline stage of torch that also records the begin and the end of each computation."""

    marks: list[Any]
    clock: Any

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing. For each new batch shape, torch would delete the gradients of earlier batches of the step."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().forward_one_chunk, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().backward_one_chunk, *args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().backward_weight_one_chunk, *args, **kwargs)

    def _timed(self, compute: Any, *args: Any, **kwargs: Any) -> Any:
        begin = self.clock.mark()
        result = compute(*args, **kwargs)
        self.marks.append((begin, self.clock.mark()))
        return result


class Pipeline:
    """The stages of this rank. `model` has the layers of this rank, and `split` is the number of layers of each stage.
    `mesh` is the device mesh of all ranks, with the dimensions dp, pp and tp. `dtype` is that of the hidden states."""

    def __init__(self, model: Any, spec: Experiment, split: Sequence[int], mesh: Any, dtype: torch.dtype) -> None:
        self.spec, self.launch, self.mesh, self.dtype, self.split = spec, spec.launch, mesh, dtype, tuple(split)
        self.group = mesh["pp"].get_group()
        self.hidden, self.config = base_model(model).config.hidden_size, base_model(model).config
        self.indices = pipeline.of_rank(self.launch.schedule, mesh["pp"].size(), mesh["pp"].get_local_rank())
        narrow = torch.bfloat16 if spec.train.precision == "bf16" else None
        total = len(split)
        self.layers = [Layers(model, pipeline.layers_of(split, at), (at, total), narrow) for at in self.indices]
        self.modules = [self._shared(layers, narrow) for layers in self.layers]
        self.clock, _ = meters(device())
        self.passes: deque[tuple[Any, list[Any], Any]] = deque(maxlen=_TIMED)
        self._made: tuple[Any, Any] = (None, None)
        self.tied = self._tied_weight()
        self.copy = None if self.layers[0].first else self.tied  # `norm` skips this copy: the first stage counts it
        self.partial: list[Any] = []  # weights whose gradient is summed over the ranks of tp
        self.ends = self._ends() if self.config.tie_word_embeddings else None

    def _shared(self, layers: Layers, narrow: torch.dtype | None) -> nn.Module:
        """Return the stage, wrapped in DDP or FSDP2 if used. The wrapper sums gradients over data-parallel ranks."""
        strategy = self.launch.strategy.split("+")
        if "ddp" in strategy:
            return DistributedDataParallel(layers, process_group=self.mesh["dp"].get_group(), broadcast_buffers=False)
        if "fsdp" in strategy:
            policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow) if narrow else MixedPrecisionPolicy()
            shard = partial(fully_shard, mesh=self.mesh["dp"], mp_policy=policy)
            if narrow:
                for parameter in layers.parameters():
                    parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
            first, last = int(layers.first), len(layers.parts) - 2 * layers.last
            for layer in layers.parts[first:last]:
                shard(layer)
            shard(layers)
        return layers

    @staticmethod
    def of(model: Any) -> Any:
        """Return the pipeline of a model, or None."""
        return model.__dict__.get(KEY)

    # --- passes -------------------------------------------------------------------------------------------------------

    def train(self, batch: Batch, items: Any) -> torch.Tensor:
        """Run the forward and backward pass of a batch through all stages. Return the loss on every rank: (sum of the
        losses of all label tokens) / `items`."""
        batches = self._begin(batch, items)
        schedule, marks = self._schedule(batches[0]["input_ids"].shape)
        losses: list[torch.Tensor] = []
        target = torch.zeros(len(batches)) if len(self.split) - 1 in self.indices else None
        begin = self.clock.mark()
        schedule.step(target=target, losses=losses)
        self.passes.append((begin, [*marks], self.clock.mark()))
        marks.clear()
        return self._everywhere(losses)

    @torch.no_grad()
    def evaluate(self, batch: Batch, items: Any) -> torch.Tensor:
        """Return the loss of a batch on every rank, without gradients."""
        losses, batches = list[torch.Tensor](), self._begin(batch, items)
        for micro in batches:
            states = torch.empty((*micro["input_ids"].shape, self.hidden), dtype=self.dtype, device=device())
            for index, module in zip(self.indices, self.modules, strict=True):
                if index and index - 1 not in self.indices:
                    dist.recv(states, group=self.group, group_src=self._rank_of(index - 1))
                states = module(*([states] if index else []))
                if index == len(self.split) - 1:
                    losses.append(states.sum())
                elif index + 1 not in self.indices:
                    dist.send(states.contiguous(), group=self.group, group_dst=self._rank_of(index + 1))
        return self._everywhere(losses)

    def _rank_of(self, index: int) -> int:
        """Return the rank that has the stage with this index. Ranks are counted within their pipeline."""
        ranks = self.mesh["pp"].size()
        return next(rank for rank in range(ranks) if index in pipeline.of_rank(self.launch.schedule, ranks, rank))

    def _begin(self, batch: Batch, items: Any) -> list[Batch]:
        count = self.launch.micro_batches or 1
        parts = {key: value.chunk(count) for key, value in batch.items() if torch.is_tensor(value)}
        batches = [{key: value[at] for key, value in parts.items()} for at in range(count)]
        for layers in self.layers:
            layers.begin(batches, items)
        return batches

    def _everywhere(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Send the sum of the losses from the last stage to all ranks, and return it."""
        loss = torch.stack([*losses]).sum().detach() if losses else torch.zeros((), device=device())
        dist.broadcast(loss, dist.get_global_rank(self.group, self._rank_of(len(self.split) - 1)), self.group)
        return loss

    def _schedule(self, shape: Sequence[int]) -> tuple[Any, list[Any]]:
        """Return torch's schedule for micro-batches of this shape, and the list of begin and end events of its
        computations. A new shape needs a new schedule, because a schedule allocates buffers for one shape."""
        if self._made[0] != shape:
            marks: list[Any] = []
            stages = [self._stage(*pair, shape, marks) for pair in zip(self.indices, self.modules, strict=True)]
            kind = _SCHEDULES[self.launch.schedule]
            local: Any = stages[0] if pipeline.parts(self.launch.schedule) == 1 else stages
            schedule = kind(local, self.launch.micro_batches, loss_fn=lambda loss, _: loss.sum(), scale_grads=False)
            self._made = shape, (schedule, marks)
        return self._made[1]

    def _stage(self, index: int, module: nn.Module, shape: Sequence[int], marks: list[Any]) -> Stage:
        states = torch.empty((*shape, self.hidden), dtype=self.dtype, device="meta", requires_grad=True)
        loss = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
        total = len(self.split)
        stage = Stage(
            module, index, total, device(), input_args=() if index == 0 else (states,),
            output_args=(loss if index == total - 1 else states,), group=self.group,
        )  # fmt: skip
        stage.marks, stage.clock = marks, self.clock
        return stage

    def shard(self) -> None:
        """Shard all weights again. After an evaluation, FSDP2 leaves the embedding and the head gathered."""
        for module in self.modules:
            if isinstance(module, FSDPModule):
                module.reshard()

    def seconds(self) -> dict[str, float | None]:
        """Return median times in seconds: `pass_s` of a pass, and `busy_s` of this rank's computations in a pass. Use
        only the latest 64 passes, because the first passes also connect the ranks and compile."""
        if not self.passes:
            return {"pass_s": None, "busy_s": None}
        self.clock.wait(self.passes[-1][2])
        busy = [sum(self.clock.seconds(*pair) for pair in marks) for _, marks, _ in self.passes]
        total = [self.clock.seconds(begin, end) for begin, _, end in self.passes]
        return {"pass_s": median(total), "busy_s": median(busy)}

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _ends(self) -> Any:
        """Return the group of the first and last rank of this rank's pipeline. All ranks must call this together."""
        group = None
        for line in self.mesh.mesh.transpose(1, 2).reshape(-1, self.mesh.mesh.shape[1]).tolist():
            ends = dist.new_group([line[0], line[-1]])
            group = ends if dist.get_rank() in (line[0], line[-1]) else group
        return group

    def _tied_weight(self) -> Any:
        """Return the tied weight of embedding and head on the first and last stage. Return None on other stages."""
        ends = [layers for layers in self.layers if layers.first or layers.last]
        is_tied = ends and self.config.tie_word_embeddings
        return (ends[0].parts[0] if ends[0].first else ends[0].parts[-1]).weight if is_tied else None

    def finish_gradients(self) -> None:
        """Sum the gradients of weights that several ranks share. Call this after the last backward pass of a step."""
        for weight in self.partial:
            _sum(weight, self.mesh["tp"].get_group())
        has_both = len(self.split) - 1 - self.indices[-1] == self.indices[0] == 0
        if self.tied is not None and self.tied.grad is not None and not has_both:
            _sum(self.tied, self.ends)

    def norm(self, parameters: Sequence[Any]) -> torch.Tensor:
        """Return the norm over the gradients of all stages. A weight that two stages share counts once."""
        grads = [each.grad for each in parameters if each.grad is not None and each is not self.copy]
        kinds: dict[tuple[str, ...], list[Any]] = {}
        for grad in grads:
            names = grad.device_mesh.mesh_dim_names if isinstance(grad, DTensor) else ()
            over = tuple(name for at, name in enumerate(names) if not grad.placements[at].is_replicate())
            kinds.setdefault(over, []).append(grad.to_local() if isinstance(grad, DTensor) else grad)
        squares = torch.zeros((), device=device())
        for names, kind in kinds.items():
            square = nn.utils.get_total_norm(kind).float() ** 2
            for name in names:
                dist.all_reduce(square, group=self.mesh[name].get_group())
            squares += square
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()


def _sum(weight: Any, group: Any) -> None:
    """Sum the gradient of a weight in place over the ranks of a group. All ranks have the same shard of the weight."""
    if isinstance(weight.grad, DTensor) and weight.grad.placements != weight.placements:
        weight.grad = weight.grad.redistribute(weight.device_mesh, weight.placements)
    dist.all_reduce(weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad, group=group)
