"""What the JSON documents of a run must hold, as far as anybody reads them: a store is input like any other.

A shape is a set of types, `{key: shape}` (`*` is any other key, `!` names those that must be there, `?` those that must
be where any is), `[shape]`, a range of whole numbers, or `(shape,)` where null may stand instead. A key that a shape
does not name may hold anything: other versions write more.
"""

from pathlib import Path
from types import NoneType
from typing import Any

from ftbench.core.allocations import CATEGORIES

LARGEST = 1e60  # no number that a run writes is larger, and the product of several is still a float
DEEPEST = 40
_COUNT, _REAL, _NAME, _FLAG = {int}, {int, float}, {str}, {bool}
_NUMBER, _TEXT, _KNOWN_COUNT = _REAL | {NoneType}, {str, NoneType}, {int, NoneType}
RANKS = range(1, 1025)  # of a run

_OOM = ({"kind": _TEXT, "bytes_requested": _NUMBER, "phase": _TEXT, "step": _KNOWN_COUNT},)
_LENGTHS = {"histogram": {"edges": [_REAL], "counts": [_COUNT]}, "*": _NUMBER}
_DATASET = {
    "name": _TEXT, "hash": _TEXT, "order_hash": _TEXT, "samples": _NUMBER, "eval_samples": _NUMBER,
    "max_length": _NUMBER, "images": {"tokens": _LENGTHS, "patches": _LENGTHS, "*": _NUMBER},
    "tokens": _LENGTHS, "tokens_before_truncation": _LENGTHS,
}  # fmt: skip
_GPU = {
    "name": _TEXT, "uuid": _TEXT, "driver": _TEXT, "compute_capability": ([_COUNT],), "mig": _FLAG | {NoneType},
    "process_ids": ([_COUNT],),
} | dict.fromkeys(
    ("memory_gb", "memory_used_before_gb", "foreign_processes", "power_limit_w", "power_limit_max_w", "idle_power_w",
     "temperature_c", "sm_clock_mhz", "sm_clock_max_mhz", "memory_clock_max_mhz", "ecc_uncorrected"), _NUMBER
)  # fmt: skip
_MATMUL_SHAPE = {"attention_width": [_COUNT], "windows": [_KNOWN_COUNT], "*": _COUNT}

_MEMORY = ("total_gb", "phase", *CATEGORIES)
_MACHINE = {
    "gpu": (_GPU,), "gpus": ([_GPU],), "ceilings": ({"tflops": {"*": _NUMBER}, "*": _NUMBER},), "ftbench": {"*": _TEXT},
    "cpu": {"model": _TEXT, "*": _NUMBER}, "os": {"*": _TEXT}, "versions": {"*": _TEXT},
    "environment": {"*": _TEXT}, "shared_host": _FLAG | {NoneType},
}  # fmt: skip
_JOB = {"!": ("run", "what", "state"), "run": _NAME, "what": _NAME, "state": _NAME, "reason": _TEXT, "wall_s": _NUMBER}

SHAPES: dict[str, Any] = {
    "sweep.json": {"!": ("jobs", "running", "at"), "at": _NAME, "left_s": _NUMBER, "running": [_NAME], "jobs": [_JOB]},
    ".lock": {"!": ("pid", "host"), "pid": _COUNT, "start": _KNOWN_COUNT, "boot": _TEXT, "host": _NAME},
    "manifest.json": {"!": ("files",), "files": {"*": {"sha256": _NAME, "redacted": _COUNT}}},  # of a bundle
    "digest.json": {"!": ("files",), "files": {"*": _NAME}},
    "samples.json": {"prompts": [{"!": ("prompt",), "prompt": _NAME, "before": _TEXT, "after": _TEXT}]},
    "kernels.json": {
        "!": ("steps", "window_ms", "busy_share", "busy_share_unprofiled", "groups", "idle", "step_ms", "kernels"),
        "steps": _COUNT, "window_ms": _REAL, "busy_share": _REAL, "busy_share_unprofiled": _NUMBER,
        "step_ms": {"!": ("before",), "*": _NUMBER}, "idle": {"!": ("ms",), "ms": _REAL},
        "groups": [{"!": ("group", "time_ms"), "group": _NAME, "time_ms": _REAL}],
        "kernels": [{"!": ("name", "time_ms"), "name": _NAME, "group": _TEXT, "time_ms": _REAL, "calls": _NUMBER}],
        "warnings": [_NAME],
    },
    "timeline.json": {
        "!": ("device", "ms", "groups", "phases", "idle"), "device": _NAME, "ms": _REAL, "groups": {"*": [[_REAL]]},
        "phases": [[_REAL | _NAME]], "idle": [[_REAL]],
    },
    "memory.json": {
        "!": ("categories", "alive", "peak", "timeline"), "categories": [_NAME],
        "peak": {"!": _MEMORY, "phase": _NAME, "*": _REAL},
        "timeline": [{"!": ("at_ms", *_MEMORY), "phase": _TEXT, "*": _REAL}],
    },
    "state.json": {
        "state": _NAME, "reason": _TEXT, "started_at": _TEXT, "ended_at": _TEXT, "wall_s": _NUMBER,
        "child_exit": _NUMBER, "exit_code": _KNOWN_COUNT, "signal": _KNOWN_COUNT, "oom": _OOM,
        "owner": {"pid": _KNOWN_COUNT, "start": _KNOWN_COUNT, "boot": _TEXT, "host": _TEXT},
    },
    "phases.json": {"phases": [{"!": ("name", "start_s"), "name": _NAME, "start_s": _REAL, "*": _NUMBER}]},
    "machine.json": _MACHINE,
    "probe/*.json": {
        "machine": _MACHINE, "device": ({"kind": _TEXT},), "products": {"*": ({"best_tflops": _NUMBER},)},
        "memory": ({"*": _NUMBER},), "host_link": ({"*": _NUMBER},), "capacity": ({"*": _NUMBER},),
        "links": ({"all_reduce_bus_gbs": _NUMBER},),
        "launch_us": _NUMBER,
    },
    "applied.json": {
        "warnings": [_NAME], "reported": {"samples_per_s": _NUMBER}, "reference": ({"kind": _TEXT, "in_step": _FLAG},),
        "generation": ({"by": _TEXT, "reward": _TEXT, "reward_sha256": _TEXT},),
        "loss": _TEXT, "product_precision": _TEXT, "gpu_busy_method": _TEXT,
        "trained_dtype": _TEXT, "loss_normalisation": _TEXT, "padding": _TEXT, "patched_by": _TEXT,
        "compile_cache": _TEXT, "gradient_checkpointing": _NUMBER | _FLAG, "dataset": _DATASET,
        "matmul_shape": (_MATMUL_SHAPE,), "vision_shape": (_MATMUL_SHAPE | {"*": _REAL},),
        "model": {"class": _TEXT, "weights_gb_by_dtype": {"*": _NUMBER}, "modules": {"*": _COUNT}},
        "optimizer": {"class": _TEXT, "state": {"*": _COUNT}},
        "parameters": {
            "total": _KNOWN_COUNT, "trainable": _KNOWN_COUNT,
            "by_kind": {"*": {"total": _KNOWN_COUNT, "trainable": _KNOWN_COUNT}},
        },
    },
    "spec.json": {
        "name": _NAME, "model": {"id": _NAME, "weights": _TEXT}, "method": {"name": _NAME},
        "objective": {"name": _NAME}, "dataset": {"name": _TEXT},
        "train": {"batch_size": _COUNT, "gradient_accumulation_steps": _COUNT, "precision": _TEXT},
        "measure": {"warmup": _COUNT | _NAME, "share_gpu": _FLAG, "profile": _NAME}, "optimizations": {},
        "launch": {"gpus": RANKS, "tp": (RANKS,), "strategy": _NAME, "offload": _NAME, "framework": _NAME},
        "imported": {"*": _TEXT},
    },
    "summary.json": {
        "name": _NAME, "run_id": _NAME, "state": _NAME, "reason": _TEXT, "method": _NAME, "model": _NAME,
        "weights": _NAME, "gpu": _TEXT, "batch_size": _COUNT, "gradient_accumulation_steps": _COUNT,
        "optimizations": [_NAME], "steps": {"*": _COUNT}, "first_step_s": _NUMBER,
        "time_to_steady_s": _NUMBER, "step_time_s": {"?": ("median",), "ci95": ([_REAL],), "*": _NUMBER},
        "tokens_per_s": {"?": ("real",), "*": _NUMBER}, "samples_per_s": _NUMBER, "samples_per_hour": _NUMBER,
        "memory_gb": {"?": ("peak_phase",), "peak_phase": _TEXT, "*": _NUMBER}, "model_tflops": _NUMBER,
        "mfu": _NUMBER, "hfu": _NUMBER, "mfu_measured": _NUMBER, "drift": _NUMBER, "energy": {"*": _NUMBER},
        "bound": {"?": ("also", "why"), "verdict": _TEXT, "also": [_NAME], "why": _TEXT, "gpu_busy_method": _TEXT,
                  "*": _NUMBER},
        "outliers": [{"step": _KNOWN_COUNT, "step_time_s": _REAL, "times_the_median": _REAL, "with": [_NAME]}],
        "loss": {"*": _NUMBER}, "parameters": {"?": ("total",), "*": _KNOWN_COUNT}, "phases_s": {"*": _REAL},
        "dataset": _DATASET, "oom": _OOM, "warnings": [_NAME],
        "learning": {"state": _TEXT, "first_step": _NUMBER, "count": _NUMBER},
        "contention": {"contended": _FLAG, "*": _NUMBER}, "first_step_cache": _TEXT,
        "images_per_s": {"*": _NUMBER}, "forward_s": {"*": _NUMBER}, "parts_s": {"*": _NUMBER},
        "ranks": {"?": ("count",), "count": RANKS, "spread": {"*": {"?": ("lowest", "highest"), "*": _REAL}},
                  "memory_gb": [{"*": _NUMBER}], "token_skew": _NUMBER, "tokens_per_s_per_gpu": _NUMBER},
    },
}  # fmt: skip

_OTHER = {str, NoneType}
_PLAIN = _OTHER | {bool, int, float}
_WORDS = {NoneType: "null", bool: "yes or no", int: "a whole number", float: "a number", str: "text", list: "a list",
          dict: "an object"}  # fmt: skip


def shape_of(path: Path) -> Any:
    """Return the shape of a file by its name, or by its folder's."""
    return SHAPES.get(path.name) or SHAPES.get(f"{path.parent.name}/*.json", {})


class Misfit(ValueError):
    """A value that has not its shape; `keys` lead to it."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        self.keys: list[str] = []

    def __str__(self) -> str:
        return f"{'.'.join(self.keys)[:80] or 'it'} {self.problem}"


def check(value: Any, shape: Any, depth: int = 0) -> None:
    """Raise Misfit where a value of a JSON document has not its shape, is nested too deeply, or is a number that no run
    writes (NaN, infinite, of hundreds of digits)."""
    kind = type(value)
    if type(shape) is tuple:
        shape = None if value is None else shape[0]
    if type(shape) is range:
        if kind is not int or value not in shape:
            raise Misfit(f"is no whole number from {shape.start} to {shape.stop - 1}")
        return
    if shape is not None and (kind not in shape if type(shape) is set else kind is not type(shape)):
        raise Misfit(f"is {_WORDS[kind]}, not {_wanted(shape)}")
    if (kind is float or kind is int) and not -LARGEST < value < LARGEST:
        raise Misfit("is no number that a run writes")
    if kind is not dict and kind is not list:
        return
    if depth > DEEPEST:
        raise Misfit("is nested too deeply")
    needed = shape.get("!", shape.get("?", ()) if value else ()) if kind is dict and shape else ()
    if needed and (missing := set(needed) - value.keys()):
        raise Misfit(f"has no {min(missing)}")
    items = value.items() if kind is dict else enumerate(value)
    others = None if shape is None else shape.get("*") if kind is dict else shape[0]
    for key, part in items:
        inner = shape.get(key, others) if shape and kind is dict else others
        plain = type(part) in _PLAIN and (inner is None or (type(inner) is set and type(part) in inner))
        if plain and (type(part) in _OTHER or -LARGEST < part < LARGEST):
            continue  # nearly all values, at a tenth of the time
        try:
            check(part, inner, depth + 1)
        except Misfit as misfit:
            misfit.keys.insert(0, str(key))
            raise


def _wanted(shape: Any) -> str:
    kinds = set(shape) if isinstance(shape, set) else {type(shape)}
    return " or ".join(sorted(_WORDS[kind] for kind in (kinds - {int} if float in kinds else kinds)))
