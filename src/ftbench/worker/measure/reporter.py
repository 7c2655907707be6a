"""Log steps to TensorBoard, MLflow, Weights & Biases or Trackio during training (`train.report_to`).

transformers' own callbacks would log inside a step, where reading the loss synchronizes with the device. This callback
replaces them in the trainer and logs a row when the recorder delivers it, up to a second later. Its numbers are then on
the host and the training thread is not involved.

One thread calls all services from start to end, because MLflow and Trackio identify a run by its thread. A slow network
therefore delays neither a step nor the recorder's samples.
"""

from __future__ import annotations

import copy
import os
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from ftbench.core.rows import StepRow
from ftbench.errors import MissingError
from ftbench.store.rundir import RunDir
from ftbench.worker.measure.recorder import Recorder

PATIENCE_S = 60.0  # longest wait for services that are still sending at the end
_NOT_LOGGED = ("step", "rank")


class Reporter(TrainerCallback):
    """Replaces the services' callbacks in the trainer. Call `finish` once, after the recorder has finished."""

    def __init__(self, services: list[TrainerCallback], names: list[str]) -> None:
        self._services, self._names = services, names
        self._failures: dict[str, str] = {}
        self._context: tuple[Any, Any, Any] | None = None  # during training
        self._thread = ThreadPoolExecutor(1, "ftbench-reporter")

    @classmethod
    def of(cls, trainer: Any, directory: RunDir, recorder: Recorder) -> Reporter | None:
        """Replace the services' callbacks in `trainer` by a reporter. Return None if the spec has no services."""
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
        """Start the services and wait for them. Raise MissingError if one fails to start."""
        self._context = (args, state, control)
        self._thread.submit(self._send, "on_train_begin", self._context, model=kwargs.get("model")).result()
        if self._failures:
            raise MissingError("; ".join(self._failures.values()) + "; set it up, or remove it from train.report_to")

    def rows(self, rows: list[StepRow]) -> None:
        """Log all numbers of written rows, and their rates."""
        for row in rows:
            self._log(logs_of(row), row.step or 0, row.epoch)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Log the trainer's own values, such as its run time. The recorder has the better weighted evaluation loss."""
        own = {key: value for key, value in (logs or {}).items() if key != "eval_loss"}
        self._log(own, state.global_step, state.epoch)

    def finish(self) -> list[str]:
        """Stop the services, wait at most `PATIENCE_S`, and return one message per service that failed."""
        if self._context is not None:
            context, self._context = self._context, None
            if wait([self._thread.submit(self._send, "on_train_end", context)], PATIENCE_S).not_done:
                self._failures["all"] = f"train.report_to: not all was sent within {PATIENCE_S:.0f} seconds"
            self._thread.shutdown(wait=False)
        return list(self._failures.values())

    # --- inside ------------------------------------------------------------------------------------------------------

    def _log(self, logs: dict[str, Any], step: int, epoch: float | None) -> None:
        if self._context is not None and logs:
            args, state, control = self._context
            state = copy.copy(state)  # the trainer's own state has advanced when the row is logged
            state.global_step, state.epoch = step, epoch
            self._thread.submit(self._send, "on_log", (args, state, control), logs=logs)

    def _send(self, event: str, context: tuple[Any, Any, Any], **values: Any) -> None:
        """Send one event to all services. A service that fails gets no more events and does not end the run."""
        for name, service in zip(self._names, self._services, strict=True):
            if name in self._failures:
                continue
            try:
                getattr(service, event)(*context, **values)
                if event == "on_train_end" and name == "wandb":
                    _finish_wandb()
            except BaseException as error:  # noqa: BLE001 - including SystemExit
                after = "did not start" if event == "on_train_begin" else f"failed after step {context[1].global_step}"
                self._failures[name] = f"train.report_to: {name} {after} ({type(error).__name__}: {error})"[:500]


def logs_of(row: StepRow) -> dict[str, float]:
    """Return the known numbers of a row by column, with tokens and samples per second.

    The names of an evaluation start with `eval_`, as the services expect.
    """
    logs = {name: getattr(row, name) for name in row.__slots__ if name not in _NOT_LOGGED}
    if row.step_time_s:
        for rate, count in (("tokens_per_s", row.real_tokens), ("samples_per_s", row.samples)):
            logs[rate] = None if count is None else count / row.step_time_s
    prefix = "eval_" if row.phase == "evaluate" else ""
    return {prefix + name: value for name, value in logs.items() if isinstance(value, (int, float))}


def _finish_wandb() -> None:
    """Finish the wandb run. Its callback relies on an exit hook, which the worker skips."""
    import wandb

    wandb.finish()
