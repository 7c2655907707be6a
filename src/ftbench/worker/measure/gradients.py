"""gradients.npz: the gradients of the first steps, small enough to keep, so that two recipes can be held side by side.

Of each trained parameter its norm and a count sketch (M. Charikar, K. Chen and M. Farach-Colton, ICALP 2002): every
element is added, with a random sign, to one of `WIDTH` sums. Inner products of sketches are those of the gradients
without bias, and of what two gradients differ in a sketch keeps the norm within about sqrt(2 / WIDTH), 4 %. Signs and
places come from the parameter's name alone, so that every run on one kind of device draws the same.
"""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from ftbench.store.rundir import RunDir

WIDTH = 1024  # sums of a sketch; a smaller parameter is kept whole


class Gradients(TrainerCallback):
    """Keeps the gradients of the first `steps` as they are before they are clipped, and the weights they begin at."""

    def __init__(self, steps: int, directory: RunDir, recording: Any) -> None:
        self._steps, self._path, self._recording = steps, directory.gradients, recording
        self._sketches: list[list[torch.Tensor]] = []
        self._norms: list[list[torch.Tensor]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trained = [(name, p) for name, p in kwargs["model"].named_parameters() if p.requires_grad]
        self._parameters = {name.replace("_orig_mod.", "").removeprefix("module."): p for name, p in trained}
        self._begin = [sketch(name, p.detach()) for name, p in self._parameters.items()]

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self._steps:
            return
        norm = self._recording.grad_norm
        unclip = max(1.0, float(norm) / args.max_grad_norm) if norm is not None and args.max_grad_norm else 1.0
        gradients = [
            (name, torch.zeros_like(p) if p.grad is None else p.grad * unclip) for name, p in self._parameters.items()
        ]
        self._sketches.append([sketch(name, gradient) for name, gradient in gradients])
        self._norms.append([gradient.float().norm() for _, gradient in gradients])
        if len(self._sketches) == self._steps:
            self._write(self._path)

    def _write(self, path: Path) -> None:
        np.savez_compressed(
            path,
            names=np.array(list(self._parameters)),
            begin=np.stack([each.cpu().numpy() for each in self._begin]),
            sketches=np.stack([[each.cpu().numpy() for each in step] for step in self._sketches]),
            norms=np.array([[float(norm) for norm in step] for step in self._norms]),
        )


def sketch(name: str, values: torch.Tensor) -> torch.Tensor:
    """Return `WIDTH` sums of a tensor's elements in float32; a tensor of no more elements as it is, then zeros."""
    flat = values.reshape(-1).float()
    if len(flat) <= WIDTH:
        return torch.nn.functional.pad(flat, (0, WIDTH - len(flat)))
    generator = torch.Generator(flat.device).manual_seed(zlib.crc32(name.encode()))
    places = torch.randint(2 * WIDTH, flat.shape, generator=generator, device=flat.device)
    signed = torch.where(places < WIDTH, flat, -flat)
    return torch.zeros(WIDTH, device=flat.device).index_add_(0, places % WIDTH, signed)
