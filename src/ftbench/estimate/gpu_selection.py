"""Find the GPUs that `--gpu` names."""

import re

from ftbench.core.hardware import Gpu, find_gpu, gpus, gpus_called
from ftbench.errors import SpecError
from ftbench.spec.base import nearest

ALL = "all"
_APPLE = re.compile(r"\b(apple|mps|metal|m[1-9]( (pro|max|ultra))?)\b")


def gpus_named(text: str) -> list[Gpu]:
    """Return the GPUs of `--gpu NAME[,NAME]` or `--gpu all`, each once. Raise SpecError for an unknown name."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise SpecError("--gpu: name GPUs of `ftbench list gpus`, separated by commas, or all")
    return [*dict.fromkeys(gpu for part in names for gpu in (gpus() if part == ALL else [gpu_named(part)]))]


def gpu_named(name: str) -> Gpu:
    """Return the GPU of the table with this name, this driver name, or these words, if no other GPU matches.

    Raises:
        SpecError: No GPU matches, or several that differ in memory."""
    plain = name.casefold()
    if (exact := next((gpu for gpu in gpus() if plain == gpu.name.casefold()), None)) is not None:
        return exact
    if _APPLE.search(plain):
        raise SpecError(
            f"--gpu {name}: ftbench trains with CUDA only; name a card that you could rent (`ftbench list gpus`)"
        )
    similar = gpus_called(name)
    by_driver = next((gpu for gpu in gpus() if plain in map(str.casefold, gpu.match)), None) or find_gpu(name)
    if by_driver is not None and len({gpu.memory_gb for gpu in similar}) < 2:
        return by_driver
    if len(similar) == 1:
        return similar[0]
    if similar:
        several = ", ".join(f"{gpu.name} ({gpu.memory_gb:g} GB)" for gpu in similar)
        raise SpecError(f"--gpu {name}: matches several GPUs: {several}; name one of them")
    raise SpecError(
        f"--gpu {name}: not in the table{nearest(name, [gpu.name for gpu in gpus()])}; see `ftbench list gpus`, or "
        "give --memory-gb"
    )
