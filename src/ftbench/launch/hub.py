"""Whether models and data sets can be loaded: from the cache, or from the Hub."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ftbench.errors import MissingError
from ftbench.spec.experiment import Experiment

Verdict = Literal["ok", "warn", "n/a"]
WAIT_S = 3.0  # of one request
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_UNREACHABLE = "is not in the cache and the Hub cannot be reached"
_TRUE = ("1", "ON", "YES", "TRUE")


def check(spec: Experiment) -> None:
    """Raise MissingError if the model or the data set is not in the cache and the Hub cannot be reached."""
    if spec.launch.mock != "off" or not (problems := missing(spec, os.environ)):
        return
    verdict, why = reach(os.environ)
    if verdict != "ok":
        raise MissingError("\n".join([*(sentence for _, sentence in problems), f"the Hub is {why}"]))


def missing(spec: Experiment, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (weights or data, sentence) for what is not in the cache and has to be downloaded."""
    hub, problems = cache(environment), list[tuple[str, str]]()
    model, kept = spec.model, hub / f"models--{spec.model.id.replace('/', '--')}"
    if model.weights == "pretrained" and not model.path and not kept.exists():
        fix = "set model.path or model.weights=random"
        problems.append(("weights", f"{model.id} {_UNREACHABLE}: {fix}, or download it while online"))
    if (source := spec.dataset.source.hub) and not _has_data(source, environment):
        fix = "use dataset=sample or a file"
        problems.append(("data", f"{source} {_UNREACHABLE}: {fix}, or download it while online"))
    return problems


def _has_data(source: str, environment: Mapping[str, str]) -> bool:
    """Return whether `datasets` has prepared a data set. It writes names in snake case: `Open-Orca___open_orca`."""
    prepared = Path(environment.get("HF_DATASETS_CACHE") or _home(environment) / "datasets")
    wanted = source.replace("/", "").replace("_", "").lower()
    return prepared.is_dir() and any(path.name.replace("_", "").lower() == wanted for path in prepared.iterdir())


def cache(environment: Mapping[str, str]) -> Path:
    """Return the cache folder of the Hub's client."""
    return Path(environment.get("HF_HUB_CACHE") or _home(environment) / "hub")


def _home(environment: Mapping[str, str]) -> Path:
    caches = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(environment.get("HF_HOME") or Path(caches, "huggingface"))


def reach(environment: Mapping[str, str]) -> tuple[Verdict, str]:
    """Check whether models and data sets can be downloaded, with one HEAD request of at most WAIT_S seconds."""
    if variable := next((name for name in _OFFLINE if environment.get(name, "").upper() in _TRUE), None):
        return "n/a", f"not checked because {variable} is set: only cached models and data sets can be loaded"
    endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    reasons: list[str] = []
    # The timeout of a socket does not cover the name lookup, so the request runs in a thread.
    thread = threading.Thread(target=lambda: reasons.append(_connect(endpoint)), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    reason = reasons[0] if reasons else f"no answer within {WAIT_S:.0f} s"
    if not reason:
        return "ok", "reachable"
    return "warn", (
        f"not reachable ({reason}): set model.path or model.weights=random, set HF_ENDPOINT to a mirror, or fill the "
        "cache elsewhere and set HF_HUB_OFFLINE=1"
    )


def _connect(endpoint: str) -> str:
    """Return why the endpoint cannot be reached; empty if it answers."""
    import urllib.error  # rarely needed, and slow
    import urllib.request

    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=WAIT_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}" if error.code in (401, 403, 407) or error.code >= 500 else ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
