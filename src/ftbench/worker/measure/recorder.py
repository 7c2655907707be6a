"""The callback that records every optimizer step into steps.csv: time, memory, tokens, loss, energy.

Nothing here waits for the device inside a step. Marks are events in the stream, the loss and the gradient norm are
copied to the host asynchronously, and a thread reads twice a second what has passed, joins it with the
driver's samples and appends whole lines. A killed run therefore keeps all but the last moments.

Standard library, torch and transformers only: a framework's own environment can run it.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback

from ftbench.core.rows import StepRow
from ftbench.store.steps import StepsWriter
from ftbench.worker.measure.meters import meters, resident_gb
from ftbench.worker.measure.sampler import Sampler

TICK_S = 0.5  # each tick takes the interpreter lock from a training thread that may be waiting to launch kernels


@dataclass(slots=True)
class BatchCount:
    """What a collator put into one batch: counts of tokens and samples, and the bytes of the real tokens in order."""

    real: int = 0
    padded: int = 0
    labels: int = 0
    samples: int = 0
    longest: int = 0
    tokens: list[bytes] = field(default_factory=list)

    def add(self, other: BatchCount) -> None:
        self.real += other.real
        self.padded += other.padded
        self.labels += other.labels
        self.samples += other.samples
        self.longest = max(self.longest, other.longest)


@dataclass(slots=True)
class _Pending:
    """A finished step whose device events may not have passed yet."""

    row: StepRow
    before: Any
    begin: Any
    update: Any
    end: Any
    values: torch.Tensor | None


class Recorder(TrainerCallback):
    """Records a training run. The trainer tells it of each micro-batch (`micro_step`), of the gradient norm and of
    evaluations; everything else it sees through the callback's own hooks."""

    def __init__(
        self, writer: StepsWriter, device: torch.device, sampler: Sampler | None = None, count_graphs: bool = False
    ) -> None:
        self._writer, self._device, self._sampler, self._count_graphs = writer, device, sampler, count_graphs
        self.clock, self.memory = meters(device)
        self.batches: deque[BatchCount] = deque()  # filled by the collator, emptied by micro_step
        self.on_rows: Callable[[list[StepRow]], None] | None = None  # told of rows once they are in steps.csv
        self.position: str | None = None  # where in a step an error would strike
        self.step = 0
        self.grad_norm: Any = None
        self._order = hashlib.sha256()
        self._count = BatchCount()
        self._loss: Any = None
        self._pending: deque[_Pending] = deque()
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._values: torch.Tensor | None = None
        self._graphs = 0
        self._finished = False

    # --- hooks of the trainer, in the order of a step ----------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._device.type == "cuda":
            self._values = torch.empty((state.max_steps + 1, 2), dtype=torch.float32, pin_memory=True)
        if self._sampler:
            self._sampler.take()
        self.clock.wait()
        self.memory.reset()
        self._origin_mark = self._mark = self.clock.mark()
        self._origin = self._host_mark = time.perf_counter()
        self.position = "data"
        self._thread = threading.Thread(target=self._run, name="ftbench-recorder", daemon=True)
        self._thread.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._data_time = time.perf_counter() - self._host_mark
        self._begin = self.clock.mark()
        self._count, self._loss, self.grad_norm = BatchCount(), None, None
        self.step = state.global_step + 1
        self.position = "forward"

    def micro_step(self, loss: torch.Tensor) -> None:
        """One forward and backward pass is done; `loss` is its share of the step's loss."""
        if self.batches:
            batch = self.batches.popleft()
            self._count.add(batch)
            for tokens in batch.tokens:
                self._order.update(tokens)
        self._loss = loss if self._loss is None else self._loss + loss
        self.position = "forward"

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._update = self.clock.mark()
        self._learning_rate = float(kwargs["optimizer"].param_groups[0]["lr"])
        self.position = "optimizer"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        values = self._copy_values(state.global_step)
        end = self.clock.mark()
        now = time.perf_counter()
        row = StepRow(
            step=state.global_step,
            epoch=state.epoch,
            elapsed_time_sec=now - self._origin,
            progress_ratio=state.global_step / state.max_steps if state.max_steps else None,
            rank=args.process_index,
            phase="train",
            data_time_s=self._data_time,
            learning_rate=self._learning_rate,
            host_memory_gb=resident_gb(),
            recompiles=self._new_graphs(),
            **self._tokens(),
            **self.memory.read(),
        )
        self.memory.reset()
        self._pending.append(_Pending(row, self._mark, self._begin, self._update, end, values))
        self._mark, self._host_mark = end, now
        self.position = "data"
        self._raise_failure()

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation_begin(self) -> None:
        """Evaluation waits for the device itself, so it is timed by the host."""
        self.clock.wait()
        self.memory.reset()
        self._evaluation_begin = time.perf_counter()
        self._train_batches, self.batches = self.batches, deque()
        self.position = "evaluate"

    def evaluation_end(self, step: int, epoch: float | None, loss: float | None) -> None:
        self.clock.wait()
        now = time.perf_counter()
        self._count = BatchCount()
        for batch in self.batches:
            self._count.add(batch)
        self.batches = self._train_batches
        row = StepRow(
            step=step, epoch=epoch, elapsed_time_sec=now - self._origin, rank=0, phase="evaluate",
            step_time_s=now - self._evaluation_begin, loss=loss, host_memory_gb=resident_gb(),
            **self._tokens(), **self.memory.read(),
        )  # fmt: skip
        self.memory.reset()
        self._pending.append(_Pending(row, None, None, None, None, None))
        self.restart()
        self.position = "data"

    def restart(self) -> None:
        """The next step is timed from here: what was done since the last one is not part of it."""
        self._mark, self._host_mark = self.clock.mark(), time.perf_counter()

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits for the device, writes what is left and closes the file, once. Raises what could not be written."""
        if self._finished:
            return
        self._finished = True
        with suppress(RuntimeError):  # a broken context has already raised where it broke
            self.clock.wait()
        self._stop.set()
        if self._thread:
            self._thread.join()
        if self._failure is None:
            if self._sampler:
                self._sampler.take()
            self._drain(last=True)
        self._writer.close()
        self._raise_failure()

    @property
    def order_hash(self) -> str:
        """SHA-256 of the real tokens in the order in which they were trained on, padding and batch borders left out."""
        return self._order.hexdigest()

    @property
    def busy_method(self) -> str | None:
        """Where the shares of gpu_busy come from; None where nothing tells them."""
        return self._sampler.busy_method if self._sampler else None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _tokens(self) -> dict[str, Any]:
        count = self._count
        if not count.samples:
            return {}
        return {
            "real_tokens": count.real, "padded_tokens": count.padded, "label_tokens": count.labels,
            "samples": count.samples, "longest_sequence": count.longest,
        }  # fmt: skip

    def _copy_values(self, step: int) -> torch.Tensor | None:
        """Loss and gradient norm on their way to the host; on a GPU into pinned memory, without waiting."""
        if self._loss is None:
            return None
        loss = self._loss.detach().float().reshape(())
        norm = self.grad_norm
        norm = (
            torch.full_like(loss, float("nan")) if norm is None else torch.as_tensor(norm, device=loss.device).float()
        )
        both = torch.stack((loss, norm.detach().reshape(())))
        if self._values is None:
            return both
        slot = self._values[step]
        slot.copy_(both, non_blocking=True)
        return slot

    def _new_graphs(self) -> int | None:
        if not self._count_graphs or "torch._dynamo.utils" not in sys.modules:
            return None
        graphs = int(sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"])
        new, self._graphs = graphs - self._graphs, graphs
        return new

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while not self._stop.wait(TICK_S):
            try:
                self._tick()
            except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
                self._failure = error
                return

    def _tick(self) -> None:
        if self._sampler:
            self._sampler.take()
        self._drain()

    def _drain(self, last: bool = False) -> None:
        """Writes the steps whose events have passed and, where there is a sampler, that a sample follows."""
        done = []
        while self._pending and (self._pending[0].end is None or self.clock.done(self._pending[0].end)):
            step = self._pending[0]
            if not last and self._sampler and self._host_time(step) > self._sampler.latest:
                break
            done.append(self._complete(self._pending.popleft()))
        if done:
            self._writer.append(done)
            if self.on_rows:
                self.on_rows(done)

    def _host_time(self, step: _Pending) -> float:
        """When a step ended on the host's clock: the device's own time since training began."""
        if step.end is None:
            return self._origin + (step.row.elapsed_time_sec or 0.0)
        return self._origin + self.clock.seconds(self._origin_mark, step.end)

    def _complete(self, step: _Pending) -> StepRow:
        row = step.row
        if step.end is not None:
            row.step_time_s = self.clock.seconds(step.before, step.end)
            row.forward_backward_s = self.clock.seconds(step.begin, step.update)
            row.optimizer_s = self.clock.seconds(step.update, step.end)
        if step.values is not None:
            loss, norm = step.values.tolist()
            row.loss, row.grad_norm = loss, norm if norm == norm else None
        if self._sampler and row.step_time_s is not None:
            end = self._host_time(step)
            for name, value in self._sampler.over(end - row.step_time_s, end).items():
                setattr(row, name, value)
        return row

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
