"""`ftbench list`: the names that a spec can use."""

from collections.abc import Callable, Iterable

from ftbench.core import units
from ftbench.core.hardware import gpus
from ftbench.core.table import text_table
from ftbench.facts import architectures
from ftbench.families import describe
from ftbench.spec.datasets import DATASETS
from ftbench.spec.load import recipes, spec_keys
from ftbench.spec.methods import METHODS
from ftbench.spec.objectives import OBJECTIVES
from ftbench.spec.optimizations import Optimizations

Rows = Iterable[tuple[str, ...]]


def catalogue(what: str) -> str:
    """Return the names and meanings of one list in `LISTS` as aligned text."""
    headings, *rows = [list(row) for row in LISTS[what]()]
    if what not in _HEADED:
        headings, rows = [""] * len(headings), [headings, *rows]
    return text_table(headings, rows) + "\n"


def _models() -> Rows:
    yield "`run` trains any model on the hub or in a folder. `estimate`", "", ""
    yield "needs a folder, one of these, or a variant such as -Instruct.", "", ""
    for name, config in architectures().items():
        yield name, config["model_type"], units.parameters(describe(config).total)


def _gpus() -> Rows:
    from ftbench.estimate.gpus import capacity

    yield "GPU", ">bf16 TFLOP/s", ">memory GB", ">usable GiB", ">GB/s", ">W", "matmul rate"
    for gpu in gpus():
        figures = (gpu.bf16, gpu.memory_gb, round(capacity(gpu).usable, 2), gpu.bandwidth, gpu.watts)
        source = "published" if gpu.gemm_bf16 else "unmeasured, data sheet only"
        source += "" if gpu.compute_capability else "; no runs on AMD"
        yield gpu.name, *("none" if figure is None else f"{figure:g}" for figure in figures), source


_HEADED = ("gpus", "keys")
LISTS: dict[str, Callable[[], Rows]] = {
    "methods": lambda: ((name, method.__doc__ or "") for name, method in METHODS.items()),
    "objectives": lambda: ((name, objective.__doc__ or "") for name, objective in OBJECTIVES.items()),
    "optimizations": lambda: ((name, each.description or "") for name, each in Optimizations.model_fields.items()),
    "recipes": lambda: recipes().items(),
    "models": _models,
    "datasets": lambda: (
        (name, source.meaning + (f" ({source.hub})" if source.hub else "")) for name, source in DATASETS.items()
    ),
    "gpus": _gpus,
    "keys": lambda: [("key", "default", "meaning"), *spec_keys()],
}
