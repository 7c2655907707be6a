"""Compute a hash and a readable name for a spec. Runs with the same hash are repeats of the same experiment."""

import hashlib
import json
import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftbench.core.data_files import files_of
from ftbench.errors import DataError
from ftbench.spec import objectives
from ftbench.spec.experiment import Experiment

_END = 1 << 20  # number of bytes that are hashed at the start and at the end of a file
# Files of tokenizers and image processors in a model directory (all versions of transformers).
_TOKENIZER = (
    "chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "added_tokens.json", "chat_template.json",
    "merges.txt", "preprocessor_config.json", "processor_config.json", "special_tokens_map.json", "tokenizer.model",
    "vocab.json",
)  # fmt: skip
_AS_TEXT = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_IGNORED = {  # keys that do not change the result
    "launch": {"python", "timeout_s", "no_step_s", "mock", "mock_fits"},
    "measure": {"warmup", "save_adapter", "repeats", "profile_steps"},
}


def _relevant(spec: Experiment) -> dict[str, Any]:
    """Return the keys of a spec that change the result, with their values.

    A path is replaced by the file's name and hash, because paths differ between machines. For a model directory, the
    tokenizer files and the first weights file are also hashed. Defaults are left out: otherwise each key that a new
    version adds would change the hash of old experiments."""
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
        folder = Path(spec.model.path)
        files = (*map(folder.joinpath, _TOKENIZER), *sorted(folder.glob("*.safetensors"))[:1])
        values["model"]["path"] += [part for file in files for part in _content(file)[1:]]
    if spec.dataset.path:
        with suppress(DataError, OSError, ValueError):  # not a folder with data files
            values["dataset"]["path"] += [part for file in files_of(Path(spec.dataset.path)) for part in _content(file)]
    if rewards := values["objective"].get("reward"):
        parts = map(objectives.reward_parts, rewards)
        values["objective"]["reward"] = [[*_content(file), name] for file, name in parts]
    if spec.launch.mock != "off":
        values["mock"] = [spec.launch.mock, spec.launch.mock_fits]
    return {key: value for key, value in values.items() if value != {}}


def _content(path: Path) -> list[str | int]:
    """Return [name, size in bytes, hash] of a file, or of a directory's config.json; [name] if it cannot be read."""
    file = path / "config.json" if path.is_dir() else path
    with suppress(OSError, ValueError):
        if file.is_file():
            status = file.stat()
            return [path.name, status.st_size, _hash(file, status.st_size, status.st_mtime_ns)]
    return [path.name]


@lru_cache(maxsize=64)  # called for each cell of a sweep
def _hash(file: Path, size: int, modified: int) -> str:
    with file.open("rb") as opened:
        head = opened.read(_END)
        opened.seek(max(0, size - _END))
        return hashlib.sha256(head + opened.read(_END)).hexdigest()


def fingerprint(spec: Experiment, gpu: str | None = None) -> str:
    """Return 12 hex digits: the start of a SHA-256 over the GPU's name and all keys that change the result."""
    return _digest([_relevant(spec), gpu])


def fingerprint_without_batch(spec: Experiment, gpu: str | None = None) -> str:
    """Return a fingerprint that ignores batch size and gradient accumulation."""
    values = _relevant(spec)
    values["train"] = values.get("train", {}) | {"batch_size": None, "gradient_accumulation_steps": None}
    return _digest([values, gpu])


def _digest(values: Any) -> str:
    return hashlib.sha256(_AS_TEXT(values).encode()).hexdigest()[:12]


def slug(spec: Experiment, gpu: str | None = None) -> str:
    """Return a name such as `qwen3-8b-qlora-b4-1f2e3d4c5b6a`: model, method, batch size, fingerprint.

    With an objective other than sft and with several GPUs: `qwen3-8b-lora-dpo-fsdp-2gpus-b4-...`."""
    several = f"-{spec.launch.strategy}-{spec.launch.gpus}gpus" if spec.launch.gpus > 1 else ""
    objective = "" if spec.objective.name == "sft" else f"-{spec.objective.name}"
    trained = f"{model_slug(spec.model.id)}-{spec.method.name}{objective}"
    return f"{trained}{several}-b{spec.train.batch_size}-{fingerprint(spec, gpu)}"


def model_slug(model: str) -> str:
    """Return a short name for a model id: `qwen3-8b` for `Qwen/Qwen3-8B`."""
    return re.sub(r"[^a-z0-9.]+", "-", model.rsplit("/", 1)[-1].lower()).strip("-.")[:40] or "model"
