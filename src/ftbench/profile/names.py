"""Kernel names for people: C++ templates and their arguments cut to what tells kernels apart."""

import re

_FUNCTOR = re.compile(r"\b(?:\w*Functor\w*|\w+_kernel_cuda|\w+_kernel_impl|\w*Ops?\b(?=<)|direct_copy\w*|\w+Epilogue)")
_MOST = 72


def short(name: str) -> str:
    """Return `vectorized_elementwise_kernel (CUDAFunctor_add)` for the two hundred characters of PyTorch's own; names
    of other kinds stay, cut in the middle where they are long."""
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    if "<" not in text:
        return _cut(text if text.startswith("Mem") else text.partition("(")[0])
    head = text.partition("<")[0].split("(")[0].rsplit("::", 1)[-1]
    inner = [functor for functor in dict.fromkeys(_FUNCTOR.findall(text.partition("<")[2])) if functor not in head]
    if head in ("Kernel", "Kernel2", "device_kernel", "kernel"):  # CUTLASS: the template says it all
        inner = re.findall(r"cutlass\w*|flash\w*|Flash\w*|\w*[Gg]emm\w*|enable_\w+|f8f8\w*", text)[:2]
    return _cut(f"{head} ({inner[0]})" if inner else head)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - 20]}…{text[-19:]}"
