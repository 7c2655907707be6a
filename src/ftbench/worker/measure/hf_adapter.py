"""Record a transformers.Trainer with a callback and wrapped methods.

A subclass is not needed. Therefore the trainers of other frameworks that use transformers can be recorded too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from transformers import TrainerCallback

from ftbench.worker.measure.batch_count import COUNT, BatchCount
from ftbench.worker.outcome import Phases

DIVERGED = 20  # training stops after this number of successive steps without a finite loss


class HfRecording(TrainerCallback):
    """Callback that reports steps and evaluations of one trainer to `recorder`, and evaluation phases to `phases`.

    `grad_norm` is the gradient norm of the current step before clipping, or None. The loss of a batch is a mean over
    label tokens or over preference pairs. Set `weighed_by` to `labels` or `samples` accordingly.
    """

    def __init__(self, recorder: Any, phases: Phases | None = None, weighed_by: str = "labels") -> None:
        self._recorder, self._phases, self._weighed_by = recorder, phases, weighed_by
        self._trainer: Any = None
        self.grad_norm: Any = None
        self._learning_rate: float | None = None
        self._evaluated: list[tuple[BatchCount, Any]] = []

    def attach(self, trainer: Any) -> HfRecording:
        """Wrap methods of the trainer object, add this callback to the trainer, and return the callback."""
        self._trainer = trainer
        trainer.add_callback(self)
        for owner, name, wrapper in (
            (trainer, "compute_loss", self._compute_loss),
            (trainer, "training_step", self._training_step),
            (trainer, "prediction_step", self._prediction_step),
            (trainer, "evaluate", self._evaluate),
            (trainer.accelerator, "clip_grad_norm_", self._clip_grad_norm),
            (trainer, "_clip_grad_norm", self._clip_grad_norm),  # used instead if some parameters are sharded
        ):
            if hasattr(owner, name):
                setattr(owner, name, partial(wrapper, getattr(owner, name)))
        return self

    # --- hooks of the trainer, in the order of a step -----------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorder.start(state.max_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorder.begin_step()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorder.begin_optimizer()
        self._learning_rate = float(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._recorder.end_step(self.grad_norm, self._learning_rate, state.epoch)
        if self._recorder.without_loss >= DIVERGED and self._trainer.accelerator.num_processes == 1:
            control.should_training_stop = True

    # --- wrappers; the first argument is the original method ----------------------------------------------------------

    def _compute_loss(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        if self._trainer.model.training:
            self._recorder.position = "backward"
        return result

    def _training_step(self, train: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        count = inputs[COUNT]
        loss = train(model, inputs, *args, **kwargs)
        self._recorder.micro_batch(count, loss)
        return loss

    def _prediction_step(self, predict: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        count = inputs[COUNT]
        result = predict(model, inputs, *args, **kwargs)
        self._evaluated.append((count, result[0]))
        if self._phases:
            self._phases.touch()
        return result

    def _evaluate(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._phases.within("evaluate") if self._phases else nullcontext():
            self._recorder.begin_evaluation()
            self._evaluated = []
            metrics = evaluate(*args, **kwargs)
            total = BatchCount()
            for count, _ in self._evaluated:
                total.add(count)
            loss = mean_loss(self._evaluated, self._weighed_by)
            self._recorder.end_evaluation(total, loss, self._trainer.state.epoch)
        return metrics

    def _clip_grad_norm(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        self.grad_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return norm


def mean_loss(evaluated: list[tuple[BatchCount, Any]], weighed_by: str) -> float | None:
    """Return the mean loss per label token, or per preference pair.

    In the trainer's `eval_loss`, the weight of a batch is its number of samples. The result depends on the batch size.
    """
    weights = [(float(getattr(count, weighed_by)), loss) for count, loss in evaluated if loss is not None]
    pairs = [(weight, float(loss)) for weight, loss in weights if weight]
    return sum(n * loss for n, loss in pairs) / sum(n for n, _ in pairs) if pairs else None
