"""Record losses, gradients and weight changes in gradients.npz, for `ftbench parity`.

All values are recorded twice: at the initial weights, and at the trained weights of the reference run. The file
contains the loss of each sample. For each trained tensor, the file also contains the gradient, the weight change after
one step and after several steps, and the square root of Adam's second moment after one step, which shows the scale of
the gradient that the optimizer used. Every step trains on all samples, so packed and padded runs can be compared.

Tensors are stored as a norm and a count sketch (M. Charikar, K. Chen and M. Farach-Colton, ICALP 2002). A sketch has
`WIDTH` sums. Every element is added to one random sum, with a random sign. `norm(sketch_1 - sketch_2)` approximates
`norm(tensor_1 - tensor_2)` with a relative error of about `sqrt(2 / WIDTH)` = 4 %. The random choices depend only on
the name of the tensor and the device type, so sketches of two runs can be compared.
"""

import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback

from ftbench.errors import MissingError
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import RunDir
from ftbench.worker.data.collate import samples_of
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.measure.effective_config import innermost

WIDTH = 1024  # number of sums in a sketch; a tensor with at most this many elements is stored unchanged
POINTS = ("initial", "trained")
CHANGES = ("gradient", "moment", "step", "steps")
SETTINGS = ("lr", "betas", "eps", "weight_decay")


class Levels(TrainerCallback):
    """Callback that records losses, gradients and weight changes at the initial weights and at the trained weights.

    At both points, an extra step runs first and is undone. The extra step compiles graphs and sets the scales of 8-bit
    casts. Then `measure.gradients` optimizer steps are recorded.
    """

    def __init__(self, spec: Experiment, directory: RunDir, loop: Any, recording: Any) -> None:
        self._steps, self._path = spec.measure.gradients, directory.gradients
        self._period = 1 + self._steps
        self._weights = directory.path.parent / spec.measure.weights_of / directory.weights.name
        self._loop, self._recording = loop, recording
        self._kept: dict[str, list[np.ndarray]] = {name: [] for name in ("losses", *CHANGES)}
        self._settings: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._parameters = trained(kwargs["model"])
        self._initial = np.array([float(p.detach().float().norm()) for p in self._parameters.values()])

    @torch.no_grad()
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        point, step = divmod(state.global_step, self._period)
        if step <= 1:
            self._load(POINTS[point])
            innermost(self._loop.optimizer).state.clear()
        if step == 1:
            self._begin = {name: p.detach().clone() for name, p in self._parameters.items()}
            self._kept["losses"].append(self._losses())

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._period != 1:
            return
        norm, optimizer = self._recording.grad_norm, innermost(self._loop.optimizer)
        in_place = norm is not None and args.max_grad_norm and getattr(optimizer, "factor", None) is None
        unclip = max(1.0, float(norm) / args.max_grad_norm) if in_place else 1.0
        if (scaler := self._loop.accelerator.scaler) and not args.max_grad_norm:  # clipping also removes the scale
            unclip /= scaler.get_scale()
        self._keep("gradient", {n: torch.zeros_like(p) if p.grad is None else p.grad * unclip
                                for n, p in self._parameters.items()})  # fmt: skip
        groups = optimizer.param_groups
        self._settings = {name: sorted({str(_plain(group.get(name))) for group in groups}) for name in SETTINGS}
        self._settings["max_grad_norm"] = [str(float(args.max_grad_norm or 0))]

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = (state.global_step - 1) % self._period  # global_step already includes this step
        if step == 1:
            states = innermost(self._loop.optimizer).state
            self._keep("moment", {name: _moment(states.get(p, {}), p) for name, p in self._parameters.items()})
            self._keep("step", self._change())
        if step == self._steps:
            self._keep("steps", self._change())
            self._kept["losses"].append(self._losses())
        if state.global_step == self._period * len(POINTS) and state.is_world_process_zero:
            names = np.array(list(self._parameters))
            settings = np.array(json.dumps(self._settings))
            samples = np.array(list(self._samples()), dtype=np.int64)
            arrays = {name: np.stack(kept) for name, kept in self._kept.items()}
            arrays |= {"names": names, "settings": settings, "samples": samples, "initial": self._initial}
            np.savez_compressed(self._path, **arrays)  # type: ignore[arg-type]

    def _change(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().float() - self._begin[name].float() for name, p in self._parameters.items()}

    def _keep(self, what: str, tensors: dict[str, torch.Tensor]) -> None:
        rows = [torch.cat([t.float().norm()[None], sketch(name, t)]).cpu().numpy() for name, t in tensors.items()]
        self._kept[what].append(np.stack(rows))

    def _load(self, point: str) -> None:
        """Copy the reference run's `initial` or `trained` weights to the model. Raise MissingError without the file."""
        if not self._weights.is_file():
            raise MissingError(f"{self._weights}: weights of the reference run not found; use another --out")
        with safe_open(self._weights, "pt") as file:
            known = set(file.keys())
            for name, parameter in self._parameters.items():
                if f"{point}/{name}" in known:
                    parameter.data.copy_(file.get_tensor(f"{point}/{name}"))

    def _samples(self) -> Iterator[int]:
        """Yield a checksum of the tokens and labels of each sample, in the order of `_losses`."""
        for row in self._loop.train_dataset:
            for ids, labels in samples_of(row):
                yield zlib.crc32(labels.tobytes(), zlib.crc32(ids.tobytes()))

    def _losses(self) -> np.ndarray:
        """Return the loss of each sample. Run its batch once per sample, and mask the labels of all other samples."""
        loop, losses = self._loop, list[float]()
        rows, size = list(loop.train_dataset), loop.args.per_device_train_batch_size
        loop.model.eval()
        for batch in (rows[start : start + size] for start in range(0, len(rows), size)):
            for row, sample in ((r, s) for r, each in enumerate(batch) for s in range(len(each["lengths"]))):
                alone = [_only(each, sample if at == row else None) for at, each in enumerate(batch)]
                inputs = loop._prepare_inputs(loop.data_collator(alone))
                losses.append(float(loop.prediction_step(loop.model, inputs, True)[0]))
        loop.model.train()
        return np.array(losses)


class Weights(TrainerCallback):
    """Callback that saves the trained tensors of the reference run before and after training, for `Levels`."""

    def __init__(self, directory: RunDir) -> None:
        self._path = directory.weights

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._initial = self._tensors("initial", kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        save_file(self._initial | self._tensors("trained", kwargs["model"]), self._path)

    def _tensors(self, point: str, model: Any) -> dict[str, torch.Tensor]:
        return {f"{point}/{name}": p.detach().float().cpu().clone() for name, p in trained(model).items()}


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters by name. Remove the name parts that torch.compile and wrappers add."""
    named = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name.replace("_orig_mod.", "").removeprefix("module."): p for name, p in named}


def _only(row: dict[str, Any], sample: int | None) -> dict[str, Any]:
    """Return a row with the labels of one sample. Mask all other labels. If `sample` is None, mask all labels."""
    ends = np.cumsum(row["lengths"])
    labels = np.full_like(row["labels"], IGNORE)
    if sample is not None:
        inside = slice(ends[sample] - row["lengths"][sample], ends[sample])
        labels[inside] = row["labels"][inside]
    return {**row, "labels": labels}


def _moment(state: dict[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """Return the square root of Adam's second moment. Return zeros if the moment is missing, and NaN if it is in 8
    bits."""
    kept: Any = state.get("exp_avg_sq")
    if type(kept) is torch.Tensor and kept.is_floating_point():
        return kept.float().sqrt()
    return torch.full_like(parameter, 0.0 if kept is None else torch.nan)


def _plain(value: Any) -> Any:
    if value is None:
        return None
    return [f"{float(each):.6g}" for each in (value if isinstance(value, (tuple, list)) else [value])]


def sketch(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return the count sketch of a tensor: `WIDTH` sums in float32. Smaller tensors are only padded with zeros."""
    flat = values.reshape(-1).float()
    if len(flat) <= WIDTH:
        return torch.nn.functional.pad(flat, (0, WIDTH - len(flat)))
    generator = torch.Generator(flat.device).manual_seed(zlib.crc32(name.encode()))
    places = torch.randint(2 * WIDTH, flat.shape, generator=generator, device=flat.device)
    signed = torch.where(places < WIDTH, flat, -flat)
    return torch.zeros(WIDTH, device=flat.device).index_add_(0, places % WIDTH, signed)
