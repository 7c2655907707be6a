"""Find the GPUs that `--gpu` names. A name that fits several cards is an error that lists them."""

import re
from functools import cache

from ftbench.core.hardware import Gpu, find_gpu, gpus
from ftbench.errors import SpecError
from ftbench.spec.base import nearest

ALL = "all"
_APPLE = re.compile(r"\b(apple|mps|metal|m[1-9]( (pro|max|ultra))?)\b")
_MAKERS = ("nvidia", "geforce", "tesla", "amd", "instinct")


def gpus_named(text: str) -> list[Gpu]:
    """Return the GPUs of `--gpu NAME[,NAME]` or `--gpu all`, each once. Raise SpecError for an unknown name."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise SpecError("--gpu: name GPUs of `ftbench list gpus`, separated by commas, or all")
    return [*dict.fromkeys(gpu for part in names for gpu in (gpus() if part == ALL else [gpu_named(part)]))]


def gpu_named(name: str) -> Gpu:
    """Return the GPU with this name of the table, this driver name, or these words, if no other GPU matches.

    Raises:
        SpecError: No GPU matches, or several do."""
    plain = name.casefold()
    if (exact := next((gpu for gpu in gpus() if plain == gpu.name.casefold()), None)) is not None:
        return exact
    if _APPLE.search(plain):
        raise SpecError(
            f"--gpu {name}: ftbench trains with CUDA only; name a card that you could rent (`ftbench list gpus`)"
        )
    similar, by_driver = gpus_called(name), _by_driver(name)
    if by_driver is not None and (not similar or plain.startswith(_MAKERS)):
        return by_driver
    if len(similar) == 1:
        return similar[0]
    if similar:
        several = ", ".join(f"{gpu.name} ({gpu.memory_gb:g} GB)" for gpu in similar)
        raise SpecError(f'--gpu {name}: matches several GPUs: {several}; name one, such as --gpu "{similar[0].name}"')
    raise SpecError(
        f"--gpu {name}: not in the table{nearest(name, [gpu.name for gpu in gpus()])}; see `ftbench list gpus`, or "
        "give --memory-gb"
    )


def _by_driver(name: str) -> Gpu | None:
    """Return the GPU of a driver's full name. A part that other drivers' names share, such as A100, is not one."""
    gpu = find_gpu(name)
    if gpu is None:
        return None
    others = [part for other in gpus() if other is not gpu for part in other.match]
    own = [part for at, part in enumerate(gpu.match) if not at or not any(part in other for other in others)]
    return gpu if any(part in name for part in own) else None


def gpus_called(text: str) -> list[Gpu]:
    """Return the GPUs that match each word of a user's spelling: `rtx4090`, `4090`, `h100-pcie`, `A100 SXM 80GB`."""
    words = _words(text)
    several = len(words) > 1  # `40` names no card, and `A100 40` does
    return [gpu for gpu in gpus()
            if words and all(any(_same(word, own, several) for own in _names(gpu)) for word in words)]  # fmt: skip


def _same(word: str, own: str, or_memory: bool) -> bool:
    """Return whether a word is one of a GPU's or short for it: `sxm` for `sxm4`, and `80` for `80gb`."""
    return own == word or (word.isalpha() and own.rstrip("0123456789") == word) or (or_memory and own == f"{word}gb")


@cache
def _names(gpu: Gpu) -> frozenset[str]:
    """Return the words of a GPU's names, also joined with those that follow, and its memory."""
    names = [_words(name) for name in (gpu.name, *gpu.match)]
    runs = ("".join(name[start:end]) for name in names for start in range(len(name))
            for end in range(start + 1, len(name) + 1))  # fmt: skip
    return frozenset([*runs, f"{gpu.memory_gb:g}gb"])


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", name.casefold()) if word not in _MAKERS]
