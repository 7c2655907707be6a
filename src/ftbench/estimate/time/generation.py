"""The work of a step that generates completions with transformers' `generate`.

Prompts are processed once. Then every token is a forward pass with one position per completion."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ftbench.core import flops
from ftbench.estimate.memory.generation import cache
from ftbench.estimate.time import work
from ftbench.estimate.time.work import StepWork
from ftbench.estimate.workload.batches import Batch
from ftbench.estimate.workload.largest import BatchShape
from ftbench.estimate.workload.plan import DTYPE_BYTES, TrainingPlan, plan_of
from ftbench.estimate.workload.trainable import TrainableShape
from ftbench.spec.experiment import Experiment

_SIXTEEN_BITS = 2  # bytes of a 4-bit weight when a product reads it
_COPIED = 3  # times that the cache is read or written per token: copied for more room, and read by attention
_TOKEN_OPS = 60  # host operations per token outside the layers: temperature, sampling, stop tokens, masks, positions
_WORD = 28  # bytes per logit, read and written: a float32 copy, temperature, probabilities, noise


def step_work(spec: Experiment, shape: TrainableShape, batches: Sequence[Batch]) -> StepWork:
    """Return the work of an optimizer step, including generation."""
    training = work.step_work(spec, shape, batches)
    if not spec.objective.prompts:
        return training
    plan, passes = plan_of(spec, shape.model), spec.train.gradient_accumulation_steps
    parts: list[tuple[float, Mapping[str, float]]] = []
    for batch in batches:
        rows, prompt = passes * batch.samples, batch.positions / batch.samples - batch.made
        read = replace(batch, positions=rows * prompt, square=rows * prompt**2)
        parts.append((batch.weight, _forward(spec, plan, shape, read, rows)))
        token = replace(batch, positions=rows, square=rows * (prompt + batch.made / 2))
        added = _forward(spec, plan, shape, token, rows)
        past = BatchShape(max(1, round(rows)), max(1, round(prompt + batch.made / 2)), 0)
        added["elementwise.eager"] += _COPIED * cache(shape.model, plan, past)
        parts.append((batch.weight * max(0.0, batch.made - 1), added))
    return replace(training, generation=tuple(parts))


def _forward(
    spec: Experiment, plan: TrainingPlan, shape: TrainableShape, batch: Batch, words: float
) -> dict[str, float]:
    """Return the work of a forward pass without training, with the logits of `words` positions."""
    n, matmul, weight = batch.positions, shape.matmul, DTYPE_BYTES[spec.model.dtype]
    done: dict[str, float] = defaultdict(float)
    done["products"] = 2 * (n * (matmul.base + matmul.adapters) + words * matmul.head)
    pairs = 4 * batch.square * sum(matmul.attention_width)
    if n == words:  # one query per row
        done["attention.causal"] = pairs
    elif plan.attention == "eager":
        done["products"] += pairs
        done["elementwise.eager"] += work.SCORE / 3 * batch.square * shape.heads
    elif batch.masked:
        done["attention.masked"] = pairs
    else:
        done["attention.causal"] = n * flops.attention_per_token(matmul, batch.square / n, passes=1)
    base, adapters = work.forward_bytes(shape)
    done[work.EAGER_EXPERTS] = n * shape.model.summed(work.expert_bytes)
    done["elementwise.eager"] += n * (base + adapters) + _WORD * words * matmul.head / shape.model.hidden
    read = (_SIXTEEN_BITS if plan.quantised and not plan.mxfp4 else weight) * shape.model.linear_parameters
    done["generation"] = read + weight * matmul.head
    if plan.mxfp4:
        done["dequantise.mxfp4"] = shape.model.expert_matrices * work.MXFP4_OUT
    elif plan.quantised:
        done["dequantise"] = shape.model.linear_parameters * work.DEQUANTISED
    if shape.expert_matmul and n == words:  # weights of visited experts are copied for each token
        done["experts"] = 3 * n * shape.expert_matmul * weight
    elif shape.expert_matmul:
        done["experts"] = shape.model.expert_matrices * weight
    done["host"] = work.operations(plan, shape, batch, 0.0) / 3 + _TOKEN_OPS
    return done
