"""The callback that profiles a few steady steps and then ends the training.

    steps  1 2 3 │ 4 5 6 │ 7       │ 8 9 10    │ 11
           load  │ timed │ profiler│ profiled  │ memory
           kernels│      │ warms up│           │

Memory is recorded only in the last part, because its stack traces slow down a step. The profiler slows
down a step too, so neither is on in the timed steps. With compiled layers, the timed steps are the first three in a row
that compile nothing. If the profiler lost the GPU's events on any rank, one more step is profiled by a new profiler.
"""

import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from ftbench.core.rows import DATA, OPTIMIZER
from ftbench.errors import SpecError
from ftbench.spec.experiment import STEPS_BEFORE_PROFILE, Experiment
from ftbench.store.rundir import TRACE, WINDOW, RunDir, write_json
from ftbench.worker import parallel
from ftbench.worker.device import device
from ftbench.worker.profile.memory import Memory
from ftbench.worker.profile.ranges import Ranges, mark

SCHEMA = 1
_TIMED = 3
_LATEST = 20  # from this step on, a run is profiled even if it still compiles
_LAUNCH = re.compile(r"cu(da)?(Graph)?Launch")
_LEAST_SEEN = 0.9  # share of launches; below it the trace is unusable (profile/trace.py)


def spreads_over_cpus(on_gpu: bool) -> bool:
    """Return whether ranks send each other tensors over gloo."""
    return parallel.rank() is not None and not on_gpu


def is_lost(events: Iterable[Any]) -> bool:
    """Return whether Kineto's events have launches without the matching GPU work."""
    on_cpu = torch.profiler.DeviceType.CPU
    launched = seen = 0
    for event in events:
        if event.device_type() != on_cpu:
            seen += 1
        elif _LAUNCH.match(event.name()):
            launched += 1
    return seen < _LEAST_SEEN * launched


def _on_any_rank(fact: bool) -> bool:
    """Return whether a condition holds on any rank; all ranks must call it."""
    if parallel.rank() is None:
        return fact
    dist.all_reduce(facts := torch.tensor(float(fact), device=device()))
    return bool(facts)


class Profiler(TrainerCallback):
    """Profiles `measure.profile_steps` steps once speed is steady. Add it after the recorder."""

    def __init__(self, spec: Experiment, run: RunDir, loop: Any, clock: Any) -> None:
        self._folder, self._clock = run.profile, clock
        self._count = spec.measure.profile_steps
        self._needed = spec.measure.steps_to_profile
        self._ranges = Ranges()
        self._memory = Memory(run.profile, loop, self._ranges)
        self._on_gpu = next(loop.model.parameters()).device.type == "cuda"
        self._profiler: Any = None
        self._first: int | None = None  # first profiled step
        self._window: dict[str, Any] = {"schema": SCHEMA}
        self._lost = False
        self._compiled = (0, 0)  # graphs so far, and the step that compiled the last of them
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
            self._next(step, self._first, state.max_steps)
        else:
            self._memory.finish()
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
        return step - self._compiled[1] >= _TIMED or step >= min(_LATEST, last_chance)

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
            record_shapes=spreads_over_cpus(self._on_gpu),  # NCCL records the bytes it sends, gloo does not
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=self._count, repeat=1),
            on_trace_ready=self._keep,
        )
        self._profiler.start()

    def _keep(self, profiler: Any) -> None:
        profiler.export_chrome_trace(str(self._folder / TRACE))
        self._lost = is_lost(profiler.profiler.kineto_results.events())

    def _next(self, step: int, first: int, most: int) -> None:
        """Advance the profiler after its warm-up step and after each profiled step. Wait for the device before the
        first and after the last profiled step, so that the trace contains exactly their work."""
        begins, ends = step == first - 1, step == first + self._count - 1
        if begins or ends:
            self._clock.wait()
        self._profiler.step()
        if ends:
            self._profiler.stop()
            self._profiler = None
            is_first_try, has_room = "lost" not in self._window, step + 3 <= most
            if is_first_try and has_room and _on_any_rank(self._lost):
                self._window["lost"], self._count = self._window["profiled"], 1
                self._begin(step)
                return
        if ends:
            self._memory.start()
