"""`train.report_to`: the steps on TensorBoard, MLflow, Weights & Biases or Trackio while the run trains.

The trainer builds transformers' own callback for each service, and this callback takes them over. Their places in the
trainer's loop would log from inside a step, and a loss that is to be logged there must first be waited for on the
device. Here a row is logged when the recorder delivers it, up to a second late: its device events have passed, its
numbers are on the host, and the training thread has no part in it.

One thread talks to all services, from their start to their end: MLflow and Trackio know their run by the thread that
began it, and a slow network holds up neither a step nor the recorder's samples of the power.
"""

from __future__ import annotations

import copy
import os
import queue
import threading
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from ftbench.core.rows import StepRow
from ftbench.errors import MissingError
from ftbench.store.rundir import RunDir
from ftbench.worker.measure.recorder import Recorder

PATIENCE_S = 60.0  # for services that are still sending when the run is over
_NOT_LOGGED = ("step", "rank")


class Reporter(TrainerCallback):
    """Stands for the services' callbacks in the trainer. `finish` after the recorder's, once."""

    def __init__(self, services: list[TrainerCallback], names: list[str]) -> None:
        self._services, self._names = services, names
        self._tasks: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
        self._begun = threading.Event()
        self._failures: dict[str, str] = {}
        self._context: tuple[Any, Any, Any] | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, trainer: Any, directory: RunDir, recorder: Recorder) -> Reporter | None:
        """Take the services' callbacks out of `trainer` and put a reporter in; None where the spec names none."""
        names = [name for name in trainer.args.report_to if name != "none"]
        if not names:
            return None
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(directory.path / "tensorboard"))
        os.environ.setdefault("WANDB_DIR", str(directory.path))
        os.environ.setdefault("WANDB_PROJECT", "ftbench")
        for callback in get_reporting_integration_callbacks(names):
            trainer.pop_callback(callback)
        reporter = cls([callback() for callback in get_reporting_integration_callbacks(names)], names)
        trainer.add_callback(reporter)
        recorder.on_rows = reporter.rows
        return reporter

    # --- called by the trainer and the recorder -----------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the services and wait for them. Raises MissingError for one that does not start."""
        self._context = (args, state, control)
        self._thread = threading.Thread(target=self._run, name="ftbench-reporter", daemon=True)
        self._thread.start()
        self._tasks.put(("on_train_begin", {"state": state, "model": kwargs.get("model")}))
        self._begun.wait()
        if self._failures:
            raise MissingError("; ".join(self._failures.values()) + "; set it up, or leave it out of train.report_to")

    def rows(self, rows: list[StepRow]) -> None:
        """Log rows that are in steps.csv: every number of theirs, and the rates that a curve is read by."""
        for row in rows:
            self._log(logs_of(row), row.step or 0, row.epoch)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Log the trainer's own words (how long training took), but for the loss of an evaluation, which it weights by
        batches and the recorder by tokens."""
        kept = {key: value for key, value in (logs or {}).items() if key != "eval_loss"}
        self._log(kept, state.global_step, state.epoch)

    def finish(self) -> list[str]:
        """End the services, wait a minute at most, and return what went wrong, a sentence a service."""
        if self._thread is None or self._context is None:
            return []
        self._tasks.put(("on_train_end", {"state": self._context[1]}))
        self._tasks.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._failures["all"] = f"train.report_to: not all was sent within {PATIENCE_S:.0f} seconds"
        self._thread = None
        return list(self._failures.values())

    # --- inside ------------------------------------------------------------------------------------------------------

    def _log(self, logs: dict[str, Any], step: int, epoch: float | None) -> None:
        if self._context is not None and logs:
            # A copy: the step of the trainer's own state has moved on when the row is logged.
            state = copy.copy(self._context[1])
            state.global_step, state.epoch = step, epoch
            self._tasks.put(("on_log", {"state": state, "logs": logs}))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._send(*task)
            self._begun.set()

    def _send(self, event: str, values: dict[str, Any]) -> None:
        """Send one event to all services. One that fails is sent nothing more: it must not end a run of hours."""
        assert self._context is not None
        args, _, control = self._context
        state = values.pop("state")
        for name, service in zip(self._names, self._services, strict=True):
            if name in self._failures:
                continue
            try:
                getattr(service, event)(args, state, control, **values)
                if event == "on_train_end" and name == "wandb":
                    _finish_wandb()
            except BaseException as error:  # noqa: BLE001 - of a library that this thread belongs to (SystemExit too)
                after = "did not start" if event == "on_train_begin" else f"failed after step {state.global_step}"
                self._failures[name] = f"train.report_to: {name} {after} ({type(error).__name__}: {error})"[:500]


def logs_of(row: StepRow) -> dict[str, float]:
    """Return the numbers of a row under their column's names, with tokens and samples per second; unknown ones left
    out. The names of an evaluation begin with `eval_`, as the services expect."""
    logs = {name: getattr(row, name) for name in row.__slots__ if name not in _NOT_LOGGED}
    if row.step_time_s:
        for rate, count in (("tokens_per_s", row.real_tokens), ("samples_per_s", row.samples)):
            logs[rate] = None if count is None else count / row.step_time_s
    prefix = "eval_" if row.phase == "evaluate" else ""
    return {prefix + name: value for name, value in logs.items() if isinstance(value, (int, float))}


def _finish_wandb() -> None:
    """End the run of wandb, whose callback leaves this to an exit hook, which the worker does not wait for."""
    import wandb

    wandb.finish()
