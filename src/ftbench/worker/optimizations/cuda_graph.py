"""Run the forward and backward pass as one CUDA graph. It is recorded after a warm-up, and replayed for each batch.

A graph contains kernels and the memory addresses of their tensors. So each batch is copied into the tensors of the
recorded batch. The trainer removes gradients after a step. So each replay sets `parameter.grad` to the recorded
gradient again. Python code of the model does not run during a replay. Clipping and the optimizer are not in the graph.

With DDP, the graph contains the model without DDP's wrapper, because DDP sums gradients in Python hooks. One all-reduce
after each replay averages the gradients. It does not overlap with the backward pass, so it suits small gradients, as
those of LoRA: 87 MB for rank 8 on Qwen3-8B.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ftbench.errors import NotAppliedError, SpecError
from ftbench.spec.experiment import Experiment

WARM_UP = 3  # passes before the recording, as in torch.cuda.make_graphed_callables: they load and compile kernels
_TOKENS = "num_items_in_batch"
_HELD = "graphed_step"  # attribute of the model


class CudaGraph:
    """Records and replays a torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Call a function WARM_UP times on a separate stream, because the recording also uses a separate stream. First
        free the unused blocks of the current stream, because other streams cannot use them."""
        torch.cuda.empty_cache()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                function()
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, function: Callable[[], Any]) -> Any:
        """Record a function and return its outputs, which get values in the first replay. `thread_local` allows other
        threads to call CUDA during the recording: the step recorder reads events, and the data loader pins memory."""
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            return function()

    def replay(self) -> None:
        self._graph.replay()


class GraphedStep:
    """Replaces the trainer's forward and backward pass by a CUDA graph. `replays` counts the replays of the graph."""

    def __init__(self) -> None:
        self.replays = 0
        self._graph: CudaGraph | None = None
        self._batch: dict[str, Any] = {}
        self._gradients: list[tuple[Any, torch.Tensor]] = []
        self._loss: Any = None

    def __call__(self, train: Callable[..., Any], model: Any, batch: dict[str, Any], tokens: Any) -> torch.Tensor:
        """Return the loss of a batch and set the gradients. `train` is the trainer's forward and backward pass, and
        `tokens` is the divisor of the loss. Raise SpecError if the batch does not have the shape of the recorded batch.
        Raise NotAppliedError if the pass cannot be recorded, for example because it waits for the device."""
        given = {**batch, _TOKENS: tokens}
        several = isinstance(model, DistributedDataParallel)
        if self._graph is None:
            self._record(train, model.module if several else model, given)
        else:
            self._fill(given)
        assert self._graph is not None
        self._graph.replay()
        self.replays += 1
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if several:
            _average([gradient for _, gradient in self._gradients])
        return self._loss.clone()

    def _record(self, train: Callable[..., Any], model: Any, first_batch: dict[str, Any]) -> None:
        device = next(model.parameters()).device
        self._batch = {name: value.to(device, copy=True) if torch.is_tensor(value) else value
                       for name, value in first_batch.items()}  # fmt: skip
        batch = {name: value for name, value in self._batch.items() if name != _TOKENS}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def passes() -> Any:
            for parameter in trained:
                parameter.grad = None  # the recorded pass allocates the gradient, and replays write to the same address
            return train(model, dict(batch), self._batch[_TOKENS]), [parameter.grad for parameter in trained]

        graph = CudaGraph()
        graph.warm_up(passes)
        try:
            self._loss, gradients = graph.record(passes)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first: BaseException = error  # the first error is the cause; the last error only reports a failed recording
            while first.__context__ is not None:
                first = first.__context__
            why = str(first).strip().partition("\n")[0]
            raise NotAppliedError(
                f"optimizations.cuda_graph is on and a step cannot be recorded ({why}): set it to off"
            ) from error
        self._gradients = [pair for pair in zip(trained, gradients, strict=True) if pair[1] is not None]
        self._graph = graph

    def _fill(self, batch: dict[str, Any]) -> None:
        """Copy a batch into the tensors of the recorded batch. Raise SpecError if the shapes differ."""
        shapes, recorded = _shapes(batch), _shapes(self._batch)
        if shapes != recorded:
            name = next(name for name in {**recorded, **shapes} if shapes.get(name) != recorded.get(name))
            raise SpecError(
                f"optimizations.cuda_graph replays one batch shape, but {name} changed from {recorded.get(name)} to "
                f"{shapes.get(name)}: set optimizations.cuda_graph to off"
            )
        for name, value in batch.items():
            if torch.is_tensor(value):
                self._batch[name].copy_(value, non_blocking=True)


def _average(gradients: list[torch.Tensor]) -> None:
    """Replace the gradients by their means over all ranks, as DDP does."""
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    means = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [mean.view_as(gradient) for mean, gradient in zip(means, gradients, strict=True)])


def _shapes(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of each tensor and the value of each number in a batch. They are equal in all replays."""
    return {
        name: tuple(value.shape) if torch.is_tensor(value) else value
        for name, value in batch.items() if torch.is_tensor(value) or isinstance(value, (int, float, type(None)))
    }  # fmt: skip


def apply(model: Any, spec: Experiment) -> None:
    setattr(model, _HELD, GraphedStep())


def of(model: Any) -> GraphedStep | None:
    """Return the model's GraphedStep, or None if `cuda_graph` is off."""
    return getattr(model, _HELD, None)


def applied(model: Any, spec: Experiment) -> dict[str, Any]:
    """Return a field with the number of replays so far. Return {} if the optimization is off."""
    step = of(model)
    return {} if step is None else {"cuda_graph_replays": step.replays}


def verify(model: Any, spec: Experiment) -> list[str]:
    step = of(model)
    if not spec.optimizations.cuda_graph or (step is not None and step.replays):
        return []
    return ["optimizations.cuda_graph is on, but the first step did not replay a graph"]
