"""Train on prompts with trl's GRPOTrainer, and compute the rewards of completions.

The trained model generates the completions with transformers' `generate`, once per step. Generation is timed
separately. The reward is built in, or comes from functions in a user's file. The worker process executes this file.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from trl import GRPOConfig, GRPOTrainer

from ftbench.core import oom
from ftbench.core.rows import FLOAT32
from ftbench.core.units import some
from ftbench.errors import FtbenchError, SpecError
from ftbench.spec.base import shortened, shown
from ftbench.spec.experiment import Experiment
from ftbench.spec.objectives import reward_parts
from ftbench.store.rundir import RunDir
from ftbench.worker.data.prepare import Prepared
from ftbench.worker.measure.batch_count import COUNT, BatchCount, count_of
from ftbench.worker.methods import mismatches
from ftbench.worker.model.parts import base_model
from ftbench.worker.model.vision import reads_images
from ftbench.worker.trainer import TrainerMixin, dataset, training_arguments

NORMALISATION = {  # divisor of the sum of the token losses, by trl's loss type
    "dapo": "label tokens of the step", "dr_grpo": "completions x max_completion_length",
    "bnpo": "label tokens of a micro-batch", "grpo": "tokens of each completion",
}  # fmt: skip
EVEN = "share of even token ids"


class GrpoTrainer(TrainerMixin, GRPOTrainer):
    """GRPOTrainer for prompts that are already tokenized."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.forget_copy()
        self.data_collator = _collated
        self.columns: list[dict[str, Any]] = []  # data set columns of each prompt
        self._completions = BatchCount()

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return [ids.tolist() for ids in prompts], None, {}

    def _generate(self, prompts: list[Any]) -> Any:
        """Generate completions, and time the generation as a separate part of the step."""
        self.recorder.mark_part(None, "generation")
        result = super()._generate(prompts)
        self.recorder.mark_part("generation_s", "scoring")
        self._completions = _count(*result[:2])
        self._completions.generation["generation_peak_gb"] = self.recorder.memory.peak_gb()
        return result

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self.recorder.mark_part("scoring_s")
        self._completions.generation["reward"] = self._metrics["train"]["reward"][-1]
        return scored

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> Any:
        """Return the rewards. The reward functions get the texts, and the data set columns of the prompts."""
        texts = self.processing_class.batch_decode([ids.tolist() for ids in prompts], skip_special_tokens=True)
        rows = [self.columns[int(each["number"])] for each in inputs]
        return super()._calculate_rewards(rows, texts, completions, completion_ids)

    def _prepare_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a micro-batch of completions. The first micro-batch of a step gets the counts of all completions in
        the step, because trl shuffles the completions later."""
        inputs: dict[str, Any] = super()._prepare_inputs(batch["prompts"])
        if self._step % self.args.steps_per_generation == 0:
            batch[COUNT].add(self._completions)
            batch[COUNT].tokens = self._completions.tokens
        return inputs

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.batches.add((tuple(inputs["completion_ids"].shape), True))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def verify(self, spec: Experiment) -> list[str]:
        """Return a message for each GRPO setting that was not applied."""
        wanted: Any = spec.objective
        live = {name: getattr(self, name) for name in ("beta", "num_generations", "loss_type")}
        live |= {"max_completion_length": self.generation_config.max_new_tokens,
                 "temperature": self.generation_config.temperature}  # fmt: skip
        problems = mismatches({f"objective.{name}": (getattr(wanted, name), value) for name, value in live.items()})
        if wanted.fixed_length and self.generation_config.min_new_tokens != wanted.max_completion_length:
            problems.append("objective.fixed_length is on and completions may end earlier")
        if self.has_copy() or self.ref_model is not None:
            problems.append("objective grpo: the reference is not the base weights under the adapters")
        return problems

    def facts(self) -> dict[str, Any]:
        kind = "weights under the adapters" if self.beta else "none"
        own = [each for each in self.reward_funcs if isinstance(each, Reward)]
        return {
            "loss_normalisation": NORMALISATION[self.loss_type],
            "generation": {"by": "transformers generate", "reward": " + ".join(each.name for each in own) or EVEN}
            | ({"reward_sha256": ", ".join(each.sha256 for each in own)} if own else {}),
            "reference": {"kind": kind, "in_step": bool(self.beta)},
        }


def _collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the prompts of a step with an empty BatchCount. `_prepare_inputs` fills in the counts after generation."""
    return {"prompts": [{"prompt": row["input_ids"], "number": row["number"]} for row in rows], COUNT: BatchCount()}


def _count(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> BatchCount:
    """Return the token counts of prompts with completions. trl pads all prompts to the longest prompt, and all
    completions to the longest completion."""
    rows = [np.array([*pair[0], *pair[1]], dtype=np.int64) for pair in zip(prompts, completions, strict=True)]
    padded = len(rows) * (max(map(len, prompts)) + max(map(len, completions)))
    count = count_of(rows, padded, sum(map(len, completions)))
    count.generation["generated_tokens"] = count.labels
    return count


def build(spec: Experiment, run: RunDir, model: Any, tokenizer: Any, data: Prepared) -> GrpoTrainer:
    """Return the GRPO trainer for the spec. The order of the prompts does not change."""
    objective: Any = spec.objective
    needed = spec.global_batch // objective.group
    if reads_images(base_model(model).config):
        raise SpecError(f"objective grpo supports text models only, and {spec.model.id} is a vision model")
    if len(data.train) < needed:
        raise SpecError(
            f"dataset: {some(len(data.train), 'prompt')}, and a step needs {needed}: lower train.batch_size"
        )
    if left := len(data.train) % needed:
        data.warnings.append(f"skipped {some(left, 'prompt')} at the end: a step needs {needed}")
    known = GRPOConfig.__dataclass_fields__
    options = {name: value for name, value in training_arguments(spec, run, model).items() if name in known}
    loop = GrpoTrainer(
        model=model,
        reward_funcs=[load_reward(each) for each in objective.reward or ()] or even_tokens,
        args=GRPOConfig(
            **options,
            **{name: getattr(objective, name) for name in (
                "num_generations", "max_completion_length", "temperature", "beta", "loss_type")},
            generation_kwargs={"min_new_tokens": objective.max_completion_length} if objective.fixed_length else None,
            shuffle_dataset=False,
        ),
        processing_class=tokenizer,
        train_dataset=dataset(data.train, []).add_column("number", list(range(len(data.train)))),
    )  # fmt: skip
    rows = [row[0].row or {} for row in data.train]
    # trl passes its own `prompts` and `completions` in addition to the columns.
    names = dict.fromkeys(name for row in rows for name in row if name not in ("prompts", "completions"))
    loop.columns = [{name: row.get(name) for name in names} for row in rows]
    loop.batches = set()
    return loop


# --- rewards ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reward:
    """A user's reward function. `name` is `file.py:function`, and `sha256` is the hash of the executed file."""

    name: str
    sha256: str
    function: Callable[..., Any]

    def __call__(self, completions: Sequence[str], **given: Any) -> list[float]:
        """Return a finite number per completion. Raise SpecError if the function fails or returns something else."""
        numbers = _call(self.name, lambda: [float(each) for each in self.function(completions=completions, **given)])
        if len(numbers) != len(completions) or not all(abs(number) <= FLOAT32 for number in numbers):
            raise SpecError(
                f"objective.reward: {self.name} returned {shown(numbers)} for {some(len(completions), 'completion')}: "
                "it must return one finite number for each"
            )
        return numbers


def even_tokens(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return the share of even token ids in each completion. Every model can learn this reward."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def load_reward(reward: str) -> Reward:
    """Execute the file and return its reward function. `reward` is `FILE:FUNCTION`. Raise SpecError if this fails."""
    file, function = reward_parts(reward)
    name = f"{file.name}:{function}"
    sha256 = hashlib.sha256(_call(name, file.read_bytes)).hexdigest()
    spec: Any = importlib.util.spec_from_file_location(f"reward_{sha256}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    _call(name, lambda: spec.loader.exec_module(module))
    if not callable(reward_function := getattr(module, function, None)):
        raise SpecError(f"objective.reward: {file} does not define {function}")
    return Reward(name, sha256, reward_function)


def _call(name: str, call: Callable[[], Any]) -> Any:
    """Call a function of a user's file. Convert its errors to SpecError, except for out-of-memory errors."""
    try:
        return call()
    except (FtbenchError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        if oom.recognise(text):
            raise
        raise SpecError(f"objective.reward: {name}: {shortened(text)} (see log.txt)") from error
