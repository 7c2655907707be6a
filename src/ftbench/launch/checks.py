"""Find the launcher of a spec, and check the machine, packages, files and disk before a run starts."""

import importlib
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from ftbench.errors import MissingError, SpecError
from ftbench.launch.ranks import too_many
from ftbench.spec.base import nearest
from ftbench.spec.datasets import check_file
from ftbench.spec.experiment import Experiment
from ftbench.spec.frameworks import FRAMEWORKS
from ftbench.spec.incompatibilities import incompatibilities
from ftbench.spec.objectives import reward_parts
from ftbench.store.rundir import RunDir, first_gpu

MINIMUM_FREE_BYTES = 32 * 2**20
Verdict = Literal["ok", "warn", "n/a"]
WAIT_S = 3.0  # longest wait for an answer of the Hub
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_UNREACHABLE = "is not in the cache and the Hub cannot be reached"
_TRUE = ("1", "ON", "YES", "TRUE")


class Launcher(Protocol):
    """Interface of the modules that turn a spec into a training command: trl, frameworks and mock."""

    def problems(self, spec: Experiment, capability: tuple[int, int] | None) -> list[str]:
        """Return error messages for settings that do not work on a GPU of this compute capability (None: no GPU)."""

    def check_installed(self, spec: Experiment) -> None:
        """Raise MissingError with the install command if a package is missing. Do not import the packages."""

    def devices(self, spec: Experiment, visible: str | None) -> list[dict[str, Any]]:
        """Return the GPUs that the spec uses, as in machine.json. `visible` is CUDA_VISIBLE_DEVICES."""

    def command(self, spec: Experiment, run: RunDir) -> list[str]:
        """Return the command that trains the spec in a run directory."""

    def environment(self, inherited: Mapping[str, str], spec: Experiment) -> dict[str, str]:
        """Return the environment variables for the command."""


LAUNCHERS = {"trl": "trl", "mock": "mock", **dict.fromkeys(FRAMEWORKS, "frameworks")}  # modules of this package


def launcher_of(spec: Experiment) -> Launcher:
    """Import and return the launcher of a spec."""
    name = LAUNCHERS[spec.launch.framework if spec.launch.mock == "off" else "mock"]
    return cast(Launcher, importlib.import_module(f"ftbench.launch.{name}"))


def check(spec: Experiment, described: dict[str, Any], most_nodes: int = 1) -> None:
    """Check that a resolved spec can run on this machine with at most `most_nodes` nodes.

    Raises:
        SpecError: If a file is missing.
        MissingError: If the machine or the installed packages are not sufficient.
    """
    check_needed(spec, problems(spec, described, most_nodes))


def problems(spec: Experiment, described: dict[str, Any], most_nodes: int = 1) -> list[str]:
    """Return an error message for each reason why a resolved spec cannot run on this machine. Files and packages are
    not checked here (see `check_needed`)."""
    others = launcher_of(spec).problems(spec, capability(described)) + too_many(spec, described)
    if spec.launch.nodes > most_nodes:
        others.append(
            f"launch.nodes: this command supports one machine, not {spec.launch.nodes}: set it to 1, or start "
            "`ftbench run` on each machine"
        )
    return incompatibilities(spec) + others


def capability(described: dict[str, Any]) -> tuple[int, int] | None:
    """Return the compute capability of the GPU in a machine.json. Return None without a GPU."""
    numbers = first_gpu(described).get("compute_capability")
    return (int(numbers[0]), int(numbers[1])) if numbers else None


def check_needed(spec: Experiment, others: Sequence[str] = ()) -> None:
    """Raise SpecError for missing files, DataError for invalid data, and MissingError for missing packages or for the
    problems in `others`. The SpecError includes the problems in `others`."""
    if wrong := _file_problems(spec):
        raise SpecError(*wrong, *others)
    if others:
        raise MissingError("\n".join(others))
    needed = (spec.dataset.samples or 1) + spec.dataset.eval_samples
    check_file(spec.dataset, spec.model, spec.objective.pairs, needed)
    launcher_of(spec).check_installed(spec)


def _file_problems(spec: Experiment) -> list[str]:
    errors = []
    path = Path(spec.dataset.path or ".")
    if not path.is_file() and not path.is_dir():  # for example, a pipe
        errors.append(f"dataset.path: {spec.dataset.path}: no such file or folder; a path is relative to its spec file")
    if spec.model.path and spec.model.weights == "pretrained":
        problem = checkpoint_problem(Path(spec.model.path))
        errors += [f"model.path: {problem}"] if problem else []
    if spec.model.path and spec.model.weights == "random":
        file = Path(spec.model.path)
        if not (file / "config.json" if file.is_dir() else file).is_file():
            errors.append(f"model.path: {spec.model.path}: no such config.json")
    for file, function in map(reward_parts, getattr(spec.objective, "reward", None) or ()):
        text = file.read_text("utf-8", "replace") if file.is_file() and os.access(file, os.R_OK) else None
        if text is None:
            errors.append(f"objective.reward: {file}: no such file, or it cannot be read")
        elif function not in (names := re.findall(r"\w+", text)) and "import *" not in text:
            errors.append(f"objective.reward: {file} does not define {function}{nearest(function, names)}")
    return errors


def check_disk(out: Path) -> None:
    """Raise MissingError if `out` cannot be written or its disk is full."""
    path = Path(os.path.realpath(out))
    existing = next(each for each in (path, *path.parents) if os.path.exists(each))  # False below a locked folder
    if not os.access(existing, os.W_OK) or not existing.is_dir():
        raise MissingError(f"{existing}: cannot be written; choose another place with --out")
    if (free := shutil.disk_usage(existing).free) < MINIMUM_FREE_BYTES:
        raise MissingError(f"{existing}: only {free / 2**20:.0f} MiB free; free some, or write elsewhere with --out")


def checkpoint_problem(folder: Path) -> str | None:
    """Return the reason why a model directory cannot be loaded, or None. Check only the names of the files."""
    if not folder.is_dir():
        return f"{folder}: no such folder; a path is relative to its spec file"
    if not (folder / "config.json").is_file():
        return f"{folder}: not a model directory: config.json is missing"
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        return (
            f"{folder}: config.json exists but no weights (*.safetensors); copy them there, or set "
            "model.weights=random to measure the same shape without weights"
        )
    return None


# --- models and data sets of the Hub ---------------------------------------------------------------------------------


def check_hub(spec: Experiment) -> None:
    """Raise MissingError if the model or the data set is not in the cache and the Hub cannot be reached."""
    if spec.launch.mock != "off" or not (problems := missing(spec, os.environ)):
        return
    verdict, why = reach(os.environ)
    if verdict != "ok":
        raise MissingError("\n".join([*problems, f"the Hub is {why}"]))


def missing(spec: Experiment, environment: Mapping[str, str]) -> list[str]:
    """Return error messages: one if the model is not in the cache, one if the data set is not in the cache."""
    problems = list[str]()
    model, kept = spec.model, cache(environment) / f"models--{spec.model.id.replace('/', '--')}"
    if model.weights == "pretrained" and not model.path and not kept.exists():
        fix = "set model.path or model.weights=random"
        problems.append(f"{model.id} {_UNREACHABLE}: {fix}, or download it while online")
    if (source := spec.dataset.source.hub) and not _has_data(source, environment):
        fix = "use dataset=sample or a file"
        problems.append(f"{source} {_UNREACHABLE}: {fix}, or download it while online")
    return problems


def _has_data(source: str, environment: Mapping[str, str]) -> bool:
    """Return whether the cache of `datasets` has a data set. Its folders have names such as `Open-Orca___open_orca`."""
    prepared = Path(environment.get("HF_DATASETS_CACHE") or _home(environment) / "datasets")
    wanted = source.replace("/", "").replace("_", "").lower()
    return prepared.is_dir() and any(path.name.replace("_", "").lower() == wanted for path in prepared.iterdir())


def cache(environment: Mapping[str, str]) -> Path:
    """Return the cache folder of the Hugging Face Hub client."""
    return Path(environment.get("HF_HUB_CACHE") or _home(environment) / "hub").expanduser()


def _home(environment: Mapping[str, str]) -> Path:
    caches = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(environment.get("HF_HOME") or Path(caches, "huggingface"))


def reach(environment: Mapping[str, str]) -> tuple[Verdict, str]:
    """Send one HEAD request to the Hub. Return (verdict, text) about whether the Hub answers within WAIT_S seconds."""
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
    """Return the reason why the endpoint cannot be reached. Return an empty string if the endpoint answers."""
    import http.client  # rarely needed, and slow
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=WAIT_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}" if error.code in (401, 403, 407) or error.code >= 500 else ""
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error))
