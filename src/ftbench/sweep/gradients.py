"""How well the gradients of two runs agree, from the sketches that they kept (`worker/measure/gradients.py`)."""

import math
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from ftbench.store.rundir import MOST_CSV_BYTES, RunDir, open_plain_file

_PARTS = ("names", "begin", "sketches", "norms")
_MOST_BYTES = 2**30  # of the arrays together; 20 steps of a thousand weights take a tenth
SAME_BEGINNING = 0.01  # share by which initial weights may differ: what rounding to 16 bits leaves


@dataclass(frozen=True, slots=True)
class Agreement:
    """A kind of module over all layers and steps: the cosine between both gradients, the lowest of a layer with that
    layer's number (None outside the layers), and the candidate's norm over the reference's."""

    module: str
    cosine: float
    lowest: float
    layer: int | None
    norm_ratio: float


def agreement(reference: RunDir, candidate: RunDir) -> tuple[list[Agreement], str]:
    """Return the agreement by kind of module, the lowest cosine first, or nothing and the reason why there is none."""
    before, after = _loaded(reference), _loaded(candidate)
    if not before or not after:
        return [], "no gradients were kept"
    if set(before["names"]) != set(after["names"]):
        return [], "other weights are trained"
    if before["sketches"].shape != after["sketches"].shape:
        return [], "other steps were kept"
    if not all(math.isfinite(side[name].sum()) for side in (before, after) for name in _PARTS[1:]):
        return [], "one of them is no number"
    order = [list(after["names"]).index(name) for name in before["names"]]
    begin, other = before["begin"], after["begin"][order]
    if float(((begin - other) ** 2).sum()) > SAME_BEGINNING**2 * float((begin**2).sum()):
        return [], "the trained weights begin at other values"
    groups = defaultdict[str, defaultdict[int | None, list[int]]](lambda: defaultdict(list))
    for index, name in enumerate(before["names"]):
        module, layer = _place_of(str(name))
        groups[module][layer].append(index)
    pairs = before["sketches"], after["sketches"][:, order], before["norms"], after["norms"][:, order]
    rows = [_agreement(module, layers, *pairs) for module, layers in groups.items()]
    return sorted((row for row in rows if row), key=lambda row: row.cosine), ""


def _loaded(run: RunDir) -> dict[str, Any]:
    """Return what `worker/measure/gradients.py` wrote; nothing where that is missing, cut short or something else."""
    import numpy as np

    try:
        with open_plain_file(run.gradients, MOST_CSV_BYTES) as file, zipfile.ZipFile(file) as kept:
            if sum(part.file_size for part in kept.infolist()) > _MOST_BYTES:
                return {}
            arrays = {name: np.load(BytesIO(kept.read(f"{name}.npy")), allow_pickle=False) for name in _PARTS}
    except (OSError, ValueError, LookupError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, MemoryError):
        return {}
    count = arrays["names"].size
    steps, width = arrays["sketches"].shape[:1], arrays["begin"].shape[1:]
    shapes = {
        "names": (count,),
        "begin": (count, *width),
        "sketches": (*steps, count, *width),
        "norms": (*steps, count),
    }
    numbers = all(arrays[name].dtype.kind == "f" for name in _PARTS[1:])
    return arrays if numbers and all(arrays[name].shape == shape for name, shape in shapes.items()) else {}


def _place_of(name: str) -> tuple[str, int | None]:
    """Return `…layers.3.self_attn.q_proj.lora_A.default.weight` → `q_proj`, 3; a norm or embedding has its own name."""
    bare = re.sub(r"(\.base_layer|\.lora_\w+(\.default)?|\.weight|\.bias)+$", "", name)
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return bare.rsplit(".", 1)[-1], int(layer[1]) if layer else None


def _agreement(
    module: str, layers: Mapping[int | None, list[int]], a: Any, b: Any, na: Any, nb: Any
) -> Agreement | None:
    """Return the row of a kind of module; None where the reference's gradient is zero."""
    every = [index for indices in layers.values() for index in indices]
    cosines = {layer: cosine for layer, places in layers.items() if (cosine := _cosine(a, b, places)) is not None}
    whole, norm = _cosine(a, b, every), float((na[:, every] ** 2).sum())
    if whole is None or not norm or not cosines:
        return None
    layer = min(cosines, key=lambda number: cosines[number])
    return Agreement(module, whole, cosines[layer], layer, (float((nb[:, every] ** 2).sum()) / norm) ** 0.5)


def _cosine(a: Any, b: Any, places: list[int]) -> float | None:
    x, y = a[:, places].ravel().astype(float), b[:, places].ravel().astype(float)
    norms = float((x @ x) * (y @ y)) ** 0.5
    return float(x @ y) / norms if norms else None
