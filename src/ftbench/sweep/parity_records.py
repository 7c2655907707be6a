"""Compare the losses and gradients of two parity runs that have the same weights, and choose their samples."""

import json
import math
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

from ftbench import families
from ftbench.core.units import listed
from ftbench.spec.batches import packed, picture_sizes, synthetic_lengths
from ftbench.spec.datasets import Dataset
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import configuration
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_steps

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
POINTS = ("initial", "trained")
CHANGES = {"gradient": "gradient", "moment": "second moment", "step": "weight change", "steps": "weight change"}
_ARRAYS = ("names", "settings", "samples", "losses", "initial", *CHANGES)
INITIAL = 1.5  # largest ratio of two norms of initial weights; another seed changes a norm by a few percent
NO_GRADIENT = 1e-5  # share of the median norm; smaller gradients are rounding noise, such as those of the key bias
LONGEST = 1024  # tokens of the longest recorded sample, if the lengths of the spec's samples are not known
SAME_SIZE = 0.15  # maximum relative difference of the number of samples in two trainings


def agreement(reference: RunDir, candidate: RunDir) -> dict[str, Any]:
    """Return the content of agreement.json. `problems` are sentences. `losses` has keys such as `initial before`
    (initial or trained weights, before or after the steps) and two lists of losses per sample in nats: reference, run.
    A row of `tensors` is [`initial` or `trained`, quantity, tensor name, direction error, log of the norm ratio]."""
    a, b = _loaded(reference), _loaded(candidate)
    result: dict[str, Any] = {"problems": [], "losses": {}, "tensors": []}
    if not a or not b or a["gradient"].shape[2] != b["gradient"].shape[2]:
        result["problems"].append("the run recorded no gradients")
        return result
    if sorted(a["samples"]) != sorted(b["samples"]):
        result["problems"].append("its tokens or labels differ from the reference's")
        return result
    if absent := sorted({*a["names"]} - {*b["names"]}):
        result["problems"].append(f"{_few(absent)} not trained, and plain trains them")
    if more := sorted({*b["names"]} - {*a["names"]}):
        result["problems"].append(f"{_few(more)} trained, and plain does not train them")
    result["problems"] += _settings(*(json.loads(str(side["settings"])) for side in (a, b)))
    result["problems"] += _initial(a, b)
    order = [list(side["samples"].argsort(kind="stable")) for side in (a, b)]
    for index, point in enumerate(POINTS):
        for offset, when in enumerate(("before", "after")):
            pair = [list(map(float, side["losses"][2 * index + offset][places]))
                    for side, places in zip((a, b), order, strict=True)]  # fmt: skip
            if all(map(math.isfinite, (*pair[0], *pair[1]))):
                result["losses"][f"{point} {when}"] = pair
            else:
                result["problems"].append(f"the loss of a sample is not finite at {point} weights, {when} the steps")
    for index, point in enumerate(POINTS):
        sentences, rows = _tensors(a, b, index)
        result["problems"] += [f"{sentence} at {point} weights" for sentence in sentences]
        result["tensors"] += [[point, *row] for row in rows]
    return result


def _settings(a: dict[str, list[str]], b: dict[str, list[str]]) -> list[str]:
    """Return a sentence for each optimizer setting that both runs have with different values."""
    pairs = [(name, a[name], b.get(name, ["None"])) for name in a]
    return [f"the optimizer's {name} is {', '.join(y)}, and plain's is {', '.join(x)}"
            for name, x, y in pairs if "None" not in (*x, *y) and x != y]  # fmt: skip


def _initial(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Compare the norms of initial weights. If tensors are initialised differently, return a sentence about them."""
    norms = dict(zip(b["names"], b["initial"], strict=True))
    different = [name for name, norm in zip(a["names"], a["initial"], strict=True)
             if name in norms and not norm / INITIAL <= norms[name] <= norm * INITIAL]  # fmt: skip
    return [f"{_few(different)} initialised differently"] if different else []


def _tensors(a: dict[str, Any], b: dict[str, Any], point: int) -> tuple[list[str], list[list[Any]]]:
    """Compare gradients, second moments and weight changes of all tensors. Return two lists: sentences about missing or
    infinite values, and the rows of `tensors` in agreement.json."""
    places = {name: index for index, name in enumerate(b["names"])}
    norms = a["gradient"][point][:, 0]
    floor = NO_GRADIENT * float(sorted(norms[norms > 0])[int((norms > 0).sum()) // 2]) if (norms > 0).any() else 0.0
    clipping = math.log(_clip(b, point) / _clip(a, point))
    # {(problem, group): tensors}, one sentence each. A missing weight change has a sentence per tensor, because the
    # verdict ignores it in tensors that plain bfloat16 does not change either.
    dead: dict[tuple[str, str], dict[str, None]] = {}
    rows: list[list[Any]] = []
    for index, name in enumerate(a["names"]):
        if name not in places or norms[index] <= floor:
            continue
        for change, what in CHANGES.items():
            x, y = a[change][point][index].astype(float), b[change][point][places[name]].astype(float)
            if not x[0] > 0:
                continue
            if change == "moment" and (math.isnan(y[0]) or not b[change].any()):  # in 8 bits, or another optimizer
                continue
            direction = float(((x[1:] / x[0] - y[1:] / y[0]) ** 2).sum()) ** 0.5 if y[0] > 0 else math.nan
            if y[0] <= NO_GRADIENT * x[0]:
                group = name if what == "weight change" else ""
                dead.setdefault((f"no {what}", group), {})[name] = None
                if change == "gradient":
                    break  # the optimizer has nothing to apply
            elif not math.isfinite(direction):
                dead.setdefault((f"a {what} that is not finite", ""), {})[name] = None
            else:
                rows.append([change, name, direction, math.log(y[0] / x[0]) - clipping * (change == "moment")])
    return [f"{_few([*names])} {'have' if len(names) > 1 else 'has'} {what}"
            for (what, _), names in dead.items()], rows  # fmt: skip


def _clip(side: dict[str, Any], point: int) -> float:
    """Return the factor of gradient clipping, computed from the recorded norms of all gradients."""
    largest = float(json.loads(str(side["settings"])).get("max_grad_norm", ["0"])[0])
    total = math.hypot(*map(float, side["gradient"][point][:, 0]))
    return largest / total if 0 < largest < total < math.inf else 1.0


def _few(names: list[str]) -> str:
    """Return a short text for parameter names: `q_proj (4 tensors, first NAME)`, or `NAME and 3 more`."""
    short = [name.removeprefix("base_model.model.").removesuffix(".weight").replace(".default", "") for name in names]
    modules = {module_of(name) for name in names}
    if len(names) > 1 and len(kinds := {module.partition(".")[0] for module in modules}) == 1:
        return f"{kinds.pop()} ({len(names)} tensors, first {short[0]})"
    return listed(short, 1)


def module_of(name: str) -> str:
    """Return the module in a parameter's name, such as `q_proj.lora_A` in `…q_proj.lora_A.default.weight`."""
    parts = [part for part in name.split(".") if part not in ("weight", "bias", "default", "base_layer")]
    return ".".join(parts[-2:] if parts[-1].startswith("lora_") else parts[-1:])


def layer_of(name: str) -> str:
    """Return the layer number of a parameter as text. Return an empty string for parameters outside the layers."""
    parts = name.split(".")
    return parts[parts.index("layers") + 1] if "layers" in parts[:-1] else ""


def _loaded(run: RunDir) -> dict[str, Any]:
    """Return the arrays of gradients and losses of a run. Return an empty dict if the file is damaged or missing."""
    import numpy as np

    try:
        with run.gradients.open("rb") as file, np.load(file, allow_pickle=False) as kept:
            return {name: kept[name] for name in _ARRAYS}
    except (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error):
        return {}


def same_samples(spec: Experiment) -> dict[str, Any]:
    """Return a new batch size and `max_length` for a spec with packing. With these values, a packed step has about the
    same number of samples as a padded step.

    Return no changes for a spec without packing, or with data that is not generated (unknown sample lengths)."""
    if not spec.optimizations.packing or not spec.dataset.is_generated:
        return {}
    every = _lengths(spec)
    lengths = every[: spec.dataset.samples]
    steps, tokens = len(lengths) / spec.train.batch_size, spec.train.batch_size * sum(lengths) / len(lengths)
    shortest, longest = max(every), spec.dataset.max_length
    choices = ((rows, min(longest, max(shortest, round(room * tokens / rows))))
               for rows in range(max(1, int(tokens / longest)), int(tokens / shortest) + 2)
               for room in (1.0, 1.03, 1.06, 1.1, 1.2))  # fmt: skip
    rows, length = min(choices, key=lambda choice: abs(len(packed(lengths, choice[1])) / choice[0] / steps - 1))
    return {"train.batch_size": rows, "dataset.max_length": length}


def _lengths(spec: Experiment) -> list[int]:
    """Return the number of tokens of each generated sample, including held-out samples. An image adds its image tokens
    and one token after them."""
    dataset = spec.dataset
    texts = synthetic_lengths(dataset, (dataset.samples or 1) + dataset.eval_samples)
    vision = families.describe(dict(configuration(spec.model))).vision if dataset.has_images else None
    if vision is None:
        return texts
    shown = dataset.images_per_sample
    images = [vision.size(high, wide).tokens + 1 for wide, high in picture_sizes(dataset, len(texts) * shown)]
    return [text + sum(images[at * shown : (at + 1) * shown]) for at, text in enumerate(texts)]


def probe(spec: Experiment, batch: int) -> Dataset:
    """Return the dataset of a run that records gradients: two full batches of `batch` samples, and one more sample.

    If the spec has images, use its dataset. Otherwise, use generated tasks with prompts and different lengths. The
    longest sample is as long as that of the spec. The same question has different answers in different samples: a
    packed sample that attends to another one answers incorrectly."""
    count = max(9, 2 * batch + 1)
    if spec.dataset.has_images:
        structure = "tasks" if spec.dataset.is_generated else "random"
        return spec.dataset.model_copy(update={"samples": count, "eval_samples": 0, "structure": structure})
    limit = spec.dataset.max_length
    longest = max(_lengths(spec)) if spec.dataset.is_generated else min(limit, LONGEST)
    tasks = Dataset(name="synthetic", structure="tasks", samples=count, max_length=limit, seed=spec.dataset.seed,
                    mean_length=max(8.0, min(limit / 8, 100.0)))  # fmt: skip
    lengthen = longest / max(synthetic_lengths(tasks, count))
    return tasks.model_copy(update={"mean_length": max(1.0, lengthen) * (tasks.mean_length or 0)})


@dataclass(frozen=True, slots=True)
class Training:
    """The results of a training: last held-out loss (NaN if missing), number of samples, learning rate of each step."""

    held_out: float
    samples: float
    rates: tuple[float | None, ...]

    @classmethod
    def read(cls, run: RunDir) -> "Training":
        rows = read_steps(run.steps)[0]
        losses = [row.loss for row in rows if row.phase == "evaluate" and row.loss is not None]
        steps = [row for row in rows if row.phase == "train"]
        rates, samples = tuple(row.learning_rate for row in steps), sum(row.samples or 0.0 for row in steps)
        return cls(losses[-1] if losses else float("nan"), samples, rates)

    def difference(self, other: "Training") -> tuple[str, str] | None:
        """Return the (state, reason) of a verdict if the numbers of samples or the learning rates differ, else None."""
        if abs(other.samples - self.samples) > SAME_SIZE * self.samples:
            sentence = f"it trained {other.samples:,.0f} samples and the reference {self.samples:,.0f}"
            return INCONCLUSIVE, f"{sentence}: change train.batch_size"
        pairs = zip(self.rates, other.rates, strict=False)
        for step, (x, y) in enumerate(pairs, 1):
            if x is not None and y is not None and abs(y - x) > 1e-6 * x:
                return FAIL, f"its learning rate in step {step} is {y:.4g}, and plain's is {x:.4g}"
        return None
