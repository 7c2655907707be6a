"""Profile a few steady steps with a callback, then end the training (`measure.profile`).

Steps 1 to 3 load kernels. Steps 4 to 6 are timed without the profiler. Step 7 warms up the profiler, and steps 8 to 10
(`measure.profile_steps`) are profiled. On a GPU, step 11 records every memory allocation with its stack, for
pytorch.org/memory_viz. With compiled layers, the timed steps are the first three successive steps without compilation.

The trace has a range for each part of a step: data, forward, loss, metrics and backward for each micro-batch, then clip
and optimizer. `metrics` are the values that the trainer computes from the logits in addition to the loss.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from transformers import TrainerCallback
from trl.trainer import sft_trainer

from ftbench.core.rows import BACKWARD, CLIP, DATA, FORWARD, LOSS, METRICS, OPTIMIZER, PREFIX, STAGES
from ftbench.errors import SpecError
from ftbench.spec.experiment import STEPS_BEFORE_PROFILE, Experiment
from ftbench.store.rundir import SNAPSHOT, TRACE, WINDOW, RunDir, write_json
from ftbench.worker.device import device
from ftbench.worker.optimizations import chunked_loss
from ftbench.worker.parallel.stages import Pipeline, Stage

SCHEMA = 1
_TIMED = 3
_MOST_EVENTS = 400_000  # recorded events of the allocator
_LATEST = 20  # from this step on, profile even if layers are still compiled


class Profiler(TrainerCallback):
    """Callback that profiles `measure.profile_steps` steps at steady speed. Add this callback after the recorder."""

    def __init__(self, spec: Experiment, run: RunDir, loop: Any, clock: Any) -> None:
        self._folder, self._clock = run.profile, clock
        self._count = spec.measure.profile_steps
        self._needed = spec.measure.steps_to_profile
        self._on_gpu = device().type == "cuda"  # FSDP moves the model to the GPU later
        self._ranges = Ranges()
        self._profiler: Any = None
        self._first: int | None = None  # first profiled step
        self._window: dict[str, Any] = {"schema": SCHEMA}
        self._compiled = (0, 0)  # number of graphs, and the last step that compiled a graph
        self._folder.mkdir(parents=True, exist_ok=True)
        mark(loop, self._ranges)

    # --- hooks of the trainer ----------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.max_steps < self._needed:
            raise SpecError(
                f"measure.profile needs {self._needed} steps to profile {self._count} of them and this run has "
                f"{state.max_steps}: set train.max_steps={self._needed}, or give it more samples"
            )
        self._ranges.enter(DATA)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ranges.enter(OPTIMIZER)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ranges.leave()
        step = state.global_step
        if self._first is None:
            if self._is_steady(step, state.max_steps):
                self._begin(step)
        elif step < self._first + self._count:
            self._next(step, self._first)
        else:
            if self._on_gpu:
                torch.cuda.memory._dump_snapshot(str(self._folder / SNAPSHOT))
                torch.cuda.memory._record_memory_history(None)
            control.should_training_stop = True
        self._ranges.enter(DATA)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _is_steady(self, step: int, most: int) -> bool:
        graphs = int(sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"]) if (
            "torch._dynamo.utils" in sys.modules) else 0  # fmt: skip
        if graphs != self._compiled[0]:
            self._compiled = (graphs, step)
        if step < STEPS_BEFORE_PROFILE:
            return False
        last_chance = most - (self._needed - STEPS_BEFORE_PROFILE)
        steady = torch.tensor(int(step - self._compiled[1] >= _TIMED or step >= min(_LATEST, last_chance)))
        if torch.distributed.is_initialized():  # ranks compile in different steps, and must end in the same step
            torch.distributed.all_reduce(steady, torch.distributed.ReduceOp.MIN)
        return bool(steady)

    def _begin(self, step: int) -> None:
        self._first = step + 2
        self._window = {"timed": [step - _TIMED + 1, step]} | self._window
        self._window["profiled"] = [step + 2, step + 1 + self._count]
        write_json(self._folder / WINDOW, self._window)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self._count, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self._folder / TRACE)),
        )
        self._profiler.start()
        if self._on_gpu:
            # CUPTI gives the first kernels wrong times, and the profiler drops them (pytorch#192021): here, these 64.
            for _ in range(64):
                torch.ones(1, device="cuda")
                torch.cuda.synchronize()

    def _next(self, step: int, first: int) -> None:
        """Advance the profiler after a step. Wait for the device before the first and after the last profiled step. The
        trace then contains exactly the work of the profiled steps."""
        begins, ends = step == first - 1, step == first + self._count - 1
        if begins or ends:
            self._clock.wait()
        self._profiler.step()
        if ends:
            self._profiler.stop()
            self._profiler = None
            if self._on_gpu:
                torch.cuda.memory._record_memory_history("all", "alloc", "python", _MOST_EVENTS)


class Ranges:
    """Marks named ranges of time in the trace, one at a time. A range costs 1 to 2 microseconds without a profiler."""

    def __init__(self) -> None:
        self._open: Any = None

    def enter(self, name: str) -> None:
        """End the current range and begin the range `name`."""
        self.leave()
        opened = torch.profiler.record_function(PREFIX + name)
        opened.__enter__()
        self._open = lambda: opened.__exit__(None, None, None)

    def leave(self) -> None:
        if self._open is not None:
            self._open()
            self._open = None

    def around(self, function: Callable[..., Any], name: str, then: str) -> Callable[..., Any]:
        """Wrap `function` to run in the range `name`. After the call, enter the range `then`."""

        @wraps(function)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            self.enter(name)
            result = function(*args, **kwargs)
            self.enter(then)
            return result

        return ranged


def mark(loop: Any, ranges: Ranges) -> None:
    """Mark each part of a training step as a range of the trace. Pipeline stages do not have a range for the loss."""
    loop.accelerator.clip_grad_norm_ = ranges.around(loop.accelerator.clip_grad_norm_, CLIP, DATA)
    if Pipeline.of(loop.model):
        for name, part in (("forward", FORWARD), ("backward", BACKWARD), ("backward_weight", BACKWARD)):
            compute = getattr(Stage, f"{name}_one_chunk")
            setattr(Stage, f"{name}_one_chunk", ranges.around(compute, part, STAGES))
        return
    loop.model.register_forward_pre_hook(lambda *_: ranges.enter(FORWARD))
    loop.model.register_forward_hook(lambda *_: ranges.enter(METRICS))
    loop.accelerator.backward = ranges.around(loop.accelerator.backward, BACKWARD, DATA)
    base = loop.model.get_base_model() if hasattr(loop.model, "get_base_model") else loop.model
    if isinstance(getattr(type(base), "loss_function", None), property):  # defined by transformers
        base.loss_function = ranges.around(base.loss_function, LOSS, FORWARD)
    for module, name in ((chunked_loss, "chunked_loss"), (sft_trainer, "_chunked_cross_entropy_loss")):
        if hasattr(module, name):  # not in all versions of trl; kernels identify the loss too
            setattr(module, name, ranges.around(getattr(module, name), LOSS, FORWARD))
