"""Records every optimizer step of a training loop into steps.csv: time, memory, tokens, loss, energy.

Any loop can be recorded: it says where a step begins, when a micro-batch is done, when the optimizer begins and when
the step ends. Nothing here waits for the device inside a step, and at its end only for one that is two steps back.
Marks are events in the stream, the loss and the gradient norm are copied to the host asynchronously, and a thread reads
twice a second what has passed, joins it with the driver's samples and appends whole lines. A killed run therefore keeps
all but the last moments.

Standard library and torch only: a framework's own environment can run it.
"""

import hashlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ftbench.core.rows import StepRow
from ftbench.store.steps import StepsWriter
from ftbench.worker.measure.batch_count import BEFORE_FORWARD, BatchCount, Shape, number, numbers
from ftbench.worker.measure.meters import meters, resident_gb
from ftbench.worker.measure.sampler import Sampler

TICK_S = 0.5  # each tick takes the interpreter lock from a training thread that may be waiting to launch kernels
_AHEAD = 2  # steps that the host may be ahead of the device, so that its clock tells when they end
_IN_FLIGHT = 16384  # steps whose values are on their way to the host; the thread reads them within a tick


@dataclass(slots=True)
class _Pending:
    """A finished step whose device events may not have passed yet, and its values on their way, by column."""

    row: StepRow
    marks: tuple[Any, Any, Any, Any] | None = None  # the step before, begin, optimizer, end
    names: tuple[str, ...] = ()
    values: torch.Tensor | None = None
    parts: tuple[tuple[str | None, Any], ...] = ()


class Recorder:
    """Records the steps of one process. `position` is where in a step an error would strike."""

    def __init__(
        self, writer: StepsWriter, device: torch.device, sampler: Sampler | None = None, count_graphs: bool = False,
        rank: int = 0, data_rank: int | None = None,
    ) -> None:  # fmt: skip
        """`data_rank` tells ranks apart that train on different tokens; ranks that share a batch have the same."""
        self._writer, self._device, self._sampler, self._count_graphs = writer, device, sampler, count_graphs
        self._rank, self._data_rank = rank, data_rank
        self.clock, self.memory = meters(device)
        self.on_rows: Callable[[list[StepRow]], None] | None = None  # gets rows once they are in steps.csv
        self.position: str | None = None
        self.step = self.batches = 0
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
        self._graphs = 0
        self._finished = False

    # --- told by the loop, in the order of a step ---------------------------------------------------------------------

    def start(self, planned_steps: int | None = None) -> None:
        """Begin to record: the first step is timed from here. `planned_steps` makes the progress known."""
        self._planned = planned_steps
        if self._device.type == "cuda":
            self._slots = torch.empty((_IN_FLIGHT, 4), dtype=torch.float32, pin_memory=True)
        if self._sampler:
            self._sampler.take()
        self.clock.wait()
        self.memory.reset()
        self._origin_mark = self._mark = self.clock.mark()
        self._origin = self._host_mark = time.perf_counter()
        self.position = "data"
        self._thread = threading.Thread(target=self._run, name="ftbench-recorder", daemon=True)
        self._thread.start()

    def begin_step(self) -> None:
        """Mark that the batches of the next step are there."""
        self._data_time = time.perf_counter() - self._host_mark
        self._begin, self._update = self.clock.mark(), None
        self._count, self._loss, self._parts = BatchCount(), None, []
        self.step += 1
        self.position = "forward"

    def micro_batch(self, count: BatchCount | None, loss: torch.Tensor | None) -> None:
        """Add one forward and backward pass: what its batch held, and its share of the step's loss."""
        if count is not None:
            self._count.add(count)
            self.batches += 1
            self.shapes.add((count.samples and count.samples * count.sequences, count.longest, count.padded))
            for tokens in count.tokens:
                self._order.update(tokens)
        if loss is not None:
            self._loss = loss if self._loss is None else self._loss + loss
        self.position = "forward"

    def mark_part(self, column: str | None, then: str = "forward") -> None:
        """Mark that a part of the forward pass, or of what is before it, ends, whose time goes into a column, or with
        None that one begins. `then` is where an error would strike from here on."""
        if self.position in ("forward", *BEFORE_FORWARD):
            self._parts.append((column, self.clock.mark()))
            self.position = then

    def begin_optimizer(self) -> None:
        """Mark that the gradients are ready: what follows in this step is the optimizer's update."""
        self._update = self.clock.mark()
        self.position = "optimizer"

    def end_step(
        self, grad_norm: torch.Tensor | float | None = None, learning_rate: float | None = None,
        epoch: float | None = None,
    ) -> None:  # fmt: skip
        """Mark that the update is done. Raises what has kept earlier steps from being written."""
        known = {"loss": self._loss, "grad_norm": grad_norm, **self._count.columns()}
        tensors = {name: value for name, value in known.items() if torch.is_tensor(value)}
        on_device = {name: value for name, value in tensors.items() if value.device.type == self._device.type}
        values = self._on_the_way(list(on_device.values()))
        end = self.clock.mark()  # once it has passed, the values have arrived
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
            **numbers({name: value for name, value in known.items() if name not in on_device}),
            **self._state(),
        )
        self.memory.reset()
        marks = (self._mark, self._begin, self._update, end)
        self._pending.append(_Pending(row, marks, tuple(on_device), values, tuple(self._parts)))
        self._mark, self._host_mark = end, now
        self.position = "data"
        self._raise_failure()

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """Mark that an evaluation begins. It waits for the device itself, so it is timed by the host."""
        self.clock.wait()
        self.memory.reset()
        self._evaluation_begin = time.perf_counter()
        self.position = "evaluate"

    def end_evaluation(self, count: BatchCount, loss: float | None, epoch: float | None = None) -> None:
        """Record an evaluation over the samples of `count`; the next step is timed from here."""
        self.clock.wait()
        now = time.perf_counter()
        row = StepRow(
            step=self.step, epoch=epoch, elapsed_time_sec=now - self._origin, phase="evaluate",
            step_time_s=now - self._evaluation_begin, loss=loss, **numbers(count.columns()), **self._state(),
        )  # fmt: skip
        self.memory.reset()
        self._pending.append(_Pending(row))
        self.restart()
        self.position = "data"

    def restart(self) -> None:
        """Time the next step from here: what was done since the last one is not part of it."""
        self._mark, self._host_mark = self.clock.mark(), time.perf_counter()

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the device, write what is left and close the file, once. Raises what could not be written."""
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
            self.drain(last=True)
        self._writer.close()
        self._raise_failure()

    def drain(self, last: bool = False) -> None:
        """Write the steps whose events have passed and, unless it is the `last` time, that a sample of the sampler
        follows. Any thread may: it does not wait for a device, which may hang."""
        done = []
        with self._draining:
            while self._pending and (not (marks := self._pending[0].marks) or self.clock.done(marks[3])):
                if not last and self._sampler and self._host_time(self._pending[0]) > self._sampler.latest:
                    break
                done.append(self._complete(self._pending.popleft()))
            if done:
                self._writer.append(done)
        if done and self.on_rows:
            self.on_rows(done)

    @property
    def order_hash(self) -> str:
        """SHA-256 of the real tokens in the order in which they were trained on, padding and batch borders left out."""
        return self._order.hexdigest()

    @property
    def busy_method(self) -> str | None:
        """Where the shares of gpu_busy come from; None where nothing tells them."""
        return self._sampler.busy_method if self._sampler else None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Return the columns of the process as it is now."""
        return {"rank": self._rank, "data_rank": self._data_rank, "host_memory_gb": resident_gb(), **self.memory.read()}

    def _on_the_way(self, values: list[torch.Tensor]) -> torch.Tensor | None:
        """Send values to the host; on a GPU into pinned memory, without waiting."""
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
                self._tick()
            except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
                self._failure = error
                return

    def _tick(self) -> None:
        if self._sampler:
            self._sampler.take()
        self.drain()

    def _host_time(self, step: _Pending) -> float:
        """Return when a step ended on the host's clock: the device's own time since training began."""
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
                setattr(row, name, number(name, value))
        if self._sampler and row.step_time_s is not None:
            end_s = self._host_time(step)
            for name, value in self._sampler.over(end_s - row.step_time_s, end_s).items():
                setattr(row, name, value)
        return row

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
