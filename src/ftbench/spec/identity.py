"""Which runs are the same experiment: a readable slug and a hash of what changes the result."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import PurePath
from typing import Any

from ftbench.spec.experiment import Experiment


def what_changes_the_result(spec: Experiment) -> dict[str, Any]:
    """The spec without its name, how it is launched, how it is evaluated in time, and where files lie: of a path the
    last part counts, so that the same spec on two machines is the same experiment."""
    values = spec.model_dump(mode="json", exclude={"name": True, "launch": True, "measure": {"warmup", "save_adapter"}})
    for part in ("model", "dataset"):
        if path := values[part].get("path"):
            values[part]["path"] = PurePath(path).name
    return values


def fingerprint(spec: Experiment) -> str:
    """Eight hex digits of the SHA-256 of what changes the result."""
    text = json.dumps(what_changes_the_result(spec), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def slug(spec: Experiment) -> str:
    """`qwen3-8b-qlora-b4-1f2e3d4c`: model, method, batch, fingerprint; safe as a file name."""
    model = re.sub(r"[^a-z0-9.]+", "-", spec.model.id.rsplit("/", 1)[-1].lower()).strip("-.")[:40] or "model"
    return f"{model}-{spec.method.name}-b{spec.train.batch_size}-{fingerprint(spec)}"
