"""Record every optimizer step of a training loop in steps.csv: time, memory, tokens, loss and energy.

Any training loop can be recorded. The loop calls the recorder when a step begins, after each micro-batch, when the
optimizer begins, and when the step ends. The recorder never synchronizes inside a step. At the end of step n, the
recorder waits only for step n - 2. Times come from events in the CUDA stream. Loss and gradient norm are copied to the
host asynchronously. Every 0.5 s, a thread adds the driver's samples to finished steps and appends these steps to the
file. A killed run therefore loses only its last steps.

This module imports few libraries, because it also runs in the environments of other frameworks.
"""

import hashlib
import math
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ftbench.core.rows import StepRow
from ftbench.store.steps import StepsWriter
from ftbench.worker.measure.batch_count import BEFORE_FORWARD, BatchCount, Shape
from ftbench.worker.measure.meters import Sampler, meters, resident_gb

TICK_S = 0.5  # a shorter tick would take the GIL more often and delay kernel launches of the training thread
_AHEAD = 2  # the host may be this many steps ahead of the device
_IN_FLIGHT = 16384  # limit for steps with unfinished copies to the host; the thread reads the values within a tick


@dataclass(slots=True)
class _Pending:
    """A finished step that is not yet in the file: its row, device events, and values that are copied to the host."""

    row: StepRow
    marks: tuple[Any, Any, Any, Any] | None = None  # end of the previous step, begin, optimizer, end
    names: tuple[str, ...] = ()
    values: torch.Tensor | None = None
    parts: tuple[tuple[str | None, Any], ...] = ()


class Recorder:
    """Records the steps of one process. `position` is the current part of the step, for error messages."""

    def __init__(
        self, writer: StepsWriter, device: torch.device, sampler: Sampler | None = None, count_graphs: bool = False,
        rank: int = 0, data_rank: int | None = None,
    ) -> None:  # fmt: skip
        """Create a recorder. Ranks that process the same batch have the same `data_rank`."""
        self._writer, self._device, self.sampler, self._count_graphs = writer, device, sampler, count_graphs
        self._rank, self._data_rank = rank, data_rank
        self.clock, self.memory = meters(device)
        self.position: str | None = None
        self.step = self.batches = self.samples = 0
        self._planned: int | None = None
        self._order, self.shapes = hashlib.sha256(), set[Shape]()
        self._count, self._loss = BatchCount(), None
        self._parts: list[tuple[str | None, Any]] = []
        self._pending: deque[_Pending] = deque()
        self._ends: deque[Any] = deque(maxlen=_AHEAD)
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._draining = threading.Lock()
        self._thread: threading.Thread | None = None
        self._slots: torch.Tensor | None = None
        self._graphs = self.without_loss = 0  # without_loss: steps since the last finite loss
        self._finished = False

    # --- called by the loop, in the order of a step -------------------------------------------------------------------

    def start(self, planned_steps: int | None = None) -> None:
        """Start recording. The time of the first step starts now. `planned_steps` is used for the progress display."""
        self._planned = planned_steps
        if self._device.type == "cuda":
            self._slots = torch.empty((_IN_FLIGHT, 4), dtype=torch.float32, pin_memory=True)
        if self.sampler:
            self.sampler.take()
        self.clock.wait()
        self.memory.reset()
        self._origin_mark = self._mark = self.clock.mark()
        self._origin = self._host_mark = time.perf_counter()
        self.position = "data"
        self._thread = threading.Thread(target=self._run, name="ftbench-recorder", daemon=True)
        self._thread.start()

    def begin_step(self) -> None:
        """Mark the start of a step, after its batches were loaded."""
        self._data_time = time.perf_counter() - self._host_mark
        self._begin, self._update = self.clock.mark(), None
        self._count, self._loss, self._parts = BatchCount(), None, []
        self.step += 1
        self.position = "forward"

    def micro_batch(self, count: BatchCount | None, loss: torch.Tensor | None) -> None:
        """Add a micro-batch to the step. `loss` is the micro-batch's part of the loss of the step."""
        if count is not None:
            self._count.add(count)
            self.batches, self.samples = self.batches + 1, self.samples + len(count.tokens)
            self.shapes.add((count.samples * count.sequences, count.longest, count.padded))
            for tokens in count.tokens:
                self._order.update(tokens)
        if loss is not None:
            self._loss = loss if self._loss is None else self._loss + loss
        self.position = "forward"

    def mark_part(self, column: str | None, then: str = "forward") -> None:
        """Mark the end of a part of the forward pass, or of the generation before the forward pass. `column` is the
        column of steps.csv for the time since the previous mark. If it is None, the call only starts a part. `then` is
        the new value of `position`."""
        if self.position in ("forward", *BEFORE_FORWARD):
            self._parts.append((column, self.clock.mark()))
            self.position = then

    def begin_optimizer(self) -> None:
        """Mark that all gradients are computed and the optimizer starts."""
        self._update = self.clock.mark()
        self.position = "optimizer"

    def end_step(
        self, grad_norm: torch.Tensor | float | None = None, learning_rate: float | None = None,
        epoch: float | None = None,
    ) -> None:  # fmt: skip
        """Mark the end of the step. If an earlier step could not be written, raise the error of the writer."""
        figures: dict[str, Any] = {"loss": self._loss, "grad_norm": grad_norm}
        on_device = {name: value for name, value in figures.items()
                     if torch.is_tensor(value) and value.device.type == self._device.type}  # fmt: skip
        on_host: dict[str, Any] = {
            name: float(value) for name, value in figures.items() if name not in on_device and value is not None
        }
        values = self._copy_to_host(list(on_device.values()))
        end = self.clock.mark()  # after the copies: a finished mark means finished copies
        if len(self._ends) == _AHEAD:
            self.clock.wait(self._ends[0])
        self._ends.append(end)
        now = time.perf_counter()
        row = StepRow(
            step=self.step,
            epoch=epoch,
            elapsed_time_sec=now - self._origin,
            progress_ratio=self.step / self._planned if self._planned else None,
            phase="train",
            data_time_s=self._data_time,
            learning_rate=learning_rate,
            recompiles=self._new_graphs(),
            **on_host,
            **self._count.columns(),
            **self._state(),
        )
        self.memory.reset()
        marks = (self._mark, self._begin, self._update, end)
        self._pending.append(_Pending(row, marks, tuple(on_device), values, tuple(self._parts)))
        self._mark, self._host_mark = end, now
        self.position = "data"
        if self._failure is not None:
            raise self._failure

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """Mark the start of an evaluation. The host's clock is used, because an evaluation synchronizes anyway."""
        self.clock.wait()
        self.memory.reset()
        self._evaluation_begin = time.perf_counter()
        self.position = "evaluate"

    def end_evaluation(self, count: BatchCount, loss: float | None, epoch: float | None = None) -> None:
        """Record the evaluation that has ended, and start the time of the next step."""
        self.clock.wait()
        now = time.perf_counter()
        row = StepRow(
            step=self.step, epoch=epoch, elapsed_time_sec=now - self._origin, phase="evaluate",
            step_time_s=now - self._evaluation_begin, loss=loss, **count.columns(), **self._state(),
        )  # fmt: skip
        self.memory.reset()
        self._pending.append(_Pending(row))
        self.restart()
        self.position = "data"

    def restart(self) -> None:
        """Start the time of the next step now. Ignore the time since the end of the last step."""
        self._mark, self._host_mark = self.clock.mark(), time.perf_counter()

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the device, write the remaining steps and close the file. Later calls do nothing, unless a signal
        interrupted this call."""
        if self._finished:
            return
        with suppress(RuntimeError):  # the CUDA context is broken; an earlier call has raised
            self.clock.wait()
        self._stop.set()
        if self._thread:
            self._thread.join()
        if self._failure is None:
            if self.sampler:
                self.sampler.take()
            self.drain(last=True)
        self._finished = True
        self._writer.close()
        if self._failure is not None:
            raise self._failure

    def drain(self, last: bool = False) -> None:
        """Write the steps that the device has finished, without synchronizing. Any thread can call this method. A step
        is written after the sampler has a later sample. If `last` is True, do not wait for a later sample."""
        done = []
        with self._draining:
            while self._pending and (not (marks := self._pending[0].marks) or self.clock.done(marks[3])):
                if not last and self.sampler and self._host_time(self._pending[0]) > self.sampler.latest:
                    break
                done.append(self._complete(self._pending.popleft()))
            if done:
                self._writer.append(done)

    @property
    def order_hash(self) -> str:
        """SHA-256 of all tokens in training order, without padding. Batch boundaries do not change the hash."""
        return self._order.hexdigest()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Return the columns of steps.csv about this process: its ranks, host memory and device memory."""
        return {"rank": self._rank, "data_rank": self._data_rank, "host_memory_gb": resident_gb(), **self.memory.read()}

    def _copy_to_host(self, values: list[torch.Tensor]) -> torch.Tensor | None:
        """Start to copy values to the host. On a GPU, the copy to pinned memory is asynchronous."""
        if not values:
            return None
        sent = torch.stack([value.detach().float().reshape(()) for value in values])
        if self._slots is None:
            return sent
        slot = self._slots[self.step % _IN_FLIGHT, : len(values)]
        return slot.copy_(sent, non_blocking=True)

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
                if self.sampler:
                    self.sampler.take()
                self.drain()
            except Exception as error:  # noqa: BLE001 - the training thread raises this error
                self._failure = error
                return

    def _host_time(self, step: _Pending) -> float:
        """Return the end of a step in seconds of the host's clock: start of recording + device time since the start."""
        if step.marks is None:
            return self._origin + (step.row.elapsed_time_sec or 0.0)
        return self._origin + self.clock.seconds(self._origin_mark, step.marks[3])

    def _complete(self, step: _Pending) -> StepRow:
        row = step.row
        if step.marks is not None:
            before, begin, update, end = step.marks
            row.step_time_s = self.clock.seconds(before, end)
            if update is not None:
                row.forward_backward_s = self.clock.seconds(begin, update)
                row.optimizer_s = self.clock.seconds(update, end)
        for (_, begin), (column, end) in pairwise(step.parts):
            if column:
                setattr(row, column, (getattr(row, column) or 0.0) + self.clock.seconds(begin, end))
        if row.forward_backward_s is not None:
            row.forward_backward_s -= sum(getattr(row, f"{part}_s") or 0.0 for part in BEFORE_FORWARD)
        if step.values is not None:
            for name, value in zip(step.names, step.values.tolist(), strict=True):
                setattr(row, name, value)
        finite = row.loss is None or math.isfinite(row.loss)
        self.without_loss = 0 if finite else self.without_loss + 1
        if self.sampler and row.step_time_s is not None:
            end_s = self._host_time(step)
            for name, value in self.sampler.over(end_s - row.step_time_s, end_s).items():
                setattr(row, name, value)
        return row
