"""Identify runs of the same experiment: a hash of everything that changes the result, and a readable name."""

import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftbench.spec import objectives
from ftbench.spec.experiment import Experiment

_END = 1 << 20  # bytes that are hashed at the start and at the end of a file
# Files of a model directory that decide how text and images become tokens (all versions of transformers).
_TOKENIZER = (
    "chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "added_tokens.json", "chat_template.json",
    "merges.txt", "preprocessor_config.json", "processor_config.json", "special_tokens_map.json", "tokenizer.model",
    "vocab.json",
)  # fmt: skip
_AS_TEXT = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_IGNORED = {  # keys whose value does not change the result
    "launch": {"python", "timeout_s", "no_step_s", "mock", "mock_fits"},
    "measure": {"warmup", "save_adapter", "repeats", "profile_steps"},
}


def _relevant(spec: Experiment) -> dict[str, Any]:
    """Return the keys that change the result.

    Files count by name and content, not by path, so the same spec on two machines is the same experiment. Defaults are
    left out, so that a new key with a default does not change the hash of old experiments.
    """
    values: dict[str, Any] = {
        name: getattr(spec, name).model_dump(mode="json", exclude=_IGNORED.get(name), exclude_defaults=True)
        for name in type(spec).model_fields
        if name != "name"
    }
    values["method"]["name"] = spec.method.name
    on = spec.optimizations
    if spec.method.name == "unsloth" and not (spec.method.padded or on.packing or on.padding_free):
        values["method"]["padded"] = False  # older runs, which do not have this key, had padded batches
    values["objective"] |= {} if spec.objective.name == "sft" else {"name": spec.objective.name}
    for part in ("model", "dataset"):
        if path := values[part].get("path"):
            values[part]["path"] = _content(Path(path))
    if spec.model.path and spec.model.weights == "pretrained":
        values["model"]["path"] += _model_files(Path(spec.model.path))
    if rewards := values["objective"].get("reward"):
        parts = map(objectives.reward_parts, rewards)
        values["objective"]["reward"] = [[*_content(file), name] for file, name in parts]
    if spec.launch.mock != "off":
        values["mock"] = [spec.launch.mock, spec.launch.mock_fits]
    return {key: value for key, value in values.items() if value != {}}


def _content(path: Path) -> list[str | int]:
    """Return the name, size and hash of a file. For a directory, return its name and the same of its config.json."""
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.is_file():
            status = file.stat()
            return [path.name, status.st_size, _hash(file, status.st_size, status.st_mtime_ns)]
    except (OSError, ValueError):
        pass
    return [path.name]


def _model_files(path: Path) -> list[str | int]:
    """Return the size and hash of the tokenizer files and of the first weights file in a model directory."""
    weights = sorted(path.glob("*.safetensors"))[:1] if path.is_dir() else []
    return [part for file in (*map(path.joinpath, _TOKENIZER), *weights) for part in _content(file)[1:]]


@lru_cache(maxsize=64)  # called for each cell of a sweep
def _hash(file: Path, size: int, modified: int) -> str:
    with file.open("rb") as opened:
        head = opened.read(_END)
        opened.seek(max(0, size - _END))
        return hashlib.sha256(head + opened.read(_END)).hexdigest()


def fingerprint(spec: Experiment, gpu: str | None = None) -> str:
    """Return twelve hex digits of the SHA-256 of everything that changes the result: the spec and the GPU's name."""
    return _digest([_relevant(spec), gpu])


def fingerprint_without_batch(spec: Experiment, gpu: str | None = None) -> str:
    """Return the fingerprint without batch size and accumulation. Runs that share it differ only in batch size."""
    values = _relevant(spec)
    values["train"] = values.get("train", {}) | {"batch_size": None, "gradient_accumulation_steps": None}
    return _digest([values, gpu])


def _digest(values: Any) -> str:
    return hashlib.sha256(_AS_TEXT(values).encode()).hexdigest()[:12]


def slug(spec: Experiment, gpu: str | None = None) -> str:
    """Return a name such as `qwen3-8b-qlora-b4-1f2e3d4c5b6a`: model, method, batch size, fingerprint.

    An objective other than sft, and the strategy with the number of GPUs (`fsdp-2gpus`), come before the batch size.
    """
    several = f"-{spec.launch.strategy}-{spec.launch.ranks}gpus" if spec.launch.ranks > 1 else ""
    objective = "" if spec.objective.name == "sft" else f"-{spec.objective.name}"
    trained = f"{model_slug(spec.model.id)}-{spec.method.name}{objective}"
    return f"{trained}{several}-b{spec.train.batch_size}-{fingerprint(spec, gpu)}"


def model_slug(model: str) -> str:
    """Return `qwen3-8b` for `Qwen/Qwen3-8B`."""
    return re.sub(r"[^a-z0-9.]+", "-", model.rsplit("/", 1)[-1].lower()).strip("-.")[:40] or "model"
