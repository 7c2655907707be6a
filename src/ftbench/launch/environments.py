"""`ftbench env create`: an environment of another framework with the versions that were tried together.

torch comes first, for the GPU where there is one; then all that was tried, by its versions and without asking what else
a package would like, since the newest of today was tried by nobody. As long as it is being made, a file in it says so:
what was killed half-way is no environment, and is made anew.
"""

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ftbench.core.units import GIB
from ftbench.errors import MissingError, SpecError, file_problem
from ftbench.launch.frameworks import UNFINISHED, contents
from ftbench.launch.process import run_to_end
from ftbench.spec.base import known
from ftbench.spec.frameworks import FRAMEWORKS, TORCH, Framework
from ftbench.store import machine

LOG = "ftbench-create.log"
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
_CUDA_GIB = 5.0  # by which a torch with its libraries of CUDA is larger than one for the CPU
_LIMIT_S = 3600.0  # a slow line takes long for gigabytes
# What would put packages elsewhere, or find some there; and without compiled files each start takes seconds longer.
_OF_OTHERS = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONDONTWRITEBYTECODE",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_USER",
    "VIRTUAL_ENV",
)
_NO_NETWORK = re.compile(
    r"name resolution|resolve host|dns error|unreachable|Max retries|connect(ion)? (error|refused|timed out)|"
    r"error sending request|Failed to establish|Failed to fetch",
    re.IGNORECASE,
)
_NO_SPACE = "No space left on device"
_HOST = re.compile(r"https?://([\w.-]+)")


def create(name: str, path: Path | None, tell: Callable[[str], None]) -> Path:
    """Make the environment of a framework in a folder that is not there yet, `environments/NAME` if none is named, and
    return its interpreter. Raise SpecError or MissingError where that cannot be, and leave nothing behind."""
    try:
        known(name, FRAMEWORKS, "framework with an environment of its own")
    except ValueError as error:
        raise SpecError(f"env create: {error}") from None
    framework, folder = FRAMEWORKS[name], Path(os.path.abspath((path or Path("environments", name)).expanduser()))
    with _being_made(folder) as log:
        _require_space(framework, folder)
        for number, (what, ways) in enumerate(_steps(framework, folder), start=1):
            tell(f"{number}/4 {what}")
            _run(name, ways, log)
        for module in framework.empty:
            (next(folder.glob("lib/python3*/site-packages")) / f"{module}.py").write_text("")
        tell("4/4 looks at it")
        inside = contents(str(folder / "bin/python"), framework)
        if inside.problem:
            raise MissingError(f"env create {name}: its trainer cannot be imported: {inside.problem}")
    return folder / "bin/python"


@contextmanager
def _being_made(folder: Path) -> Iterator[Path]:
    """Keep a folder marked as unfinished, and for this process alone, within the block; give the log of what is run.
    Whatever ends the block early takes the folder away."""
    mark = folder / UNFINISHED
    if folder.is_symlink() or (folder.exists() and not mark.is_file()):
        raise SpecError(
            f"env create: {folder}: exists already; name another folder, or look at it with `ftbench doctor --python "
            f"{folder}/bin/python`"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = mark.open("a")
    except OSError as error:
        raise MissingError(f"env create: {folder}: {file_problem(error, 'cannot be made ({})')}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SpecError(f"env create: {folder}: another ftbench is making it") from None
        try:
            for entry in folder.iterdir():  # of one that was killed
                if entry != mark:
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            yield folder / LOG
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        mark.unlink()


def _require_space(framework: Framework, folder: Path) -> None:
    needed, free = framework.gib + (_CUDA_GIB if machine.gpu() else 0.0), shutil.disk_usage(folder).free / GIB
    if free < needed:
        raise MissingError(
            f"env create: {folder}: needs about {needed:.0f} GiB and {free:.1f} GiB are free: name a folder on "
            "another disk, or free some"
        )


def _steps(framework: Framework, folder: Path) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield what is done in words, and the command; several where the next is tried after one that fails."""
    python, uv = str(folder / "bin/python"), shutil.which("uv")
    if uv:
        make = [uv, "venv", "--allow-existing", "--python", sys.executable, str(folder)]
        install = [uv, "pip", "install", "--compile-bytecode", "--python", python]
    else:
        make = [sys.executable, "-m", "venv", str(folder)]
        install = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    yield f"an environment of Python {sys.version_info[0]}.{sys.version_info[1]} in {folder}", [make]
    if machine.gpu():
        yield f"{TORCH}, for CUDA", [[*install, TORCH]]
    else:
        cpu = ["--torch-backend", "cpu"] if uv else ["--extra-index-url", CPU_BUILDS]
        yield f"{TORCH}, for the CPU: there is no GPU", [[*install, f"{TORCH}+cpu"], [*install, f"{TORCH}+cpu", *cpu]]
    more = [] if machine.gpu() else framework.without_gpu
    yield (
        f"{framework.package} {framework.version} and {len(framework.versions) - 1} packages beside it",
        [[*install, "--no-deps", "-r", str(framework.file), *more]],
    )


def _run(name: str, ways: list[list[str]], log: Path) -> None:
    """Run the first command, and the next where it fails for another reason than that the disk is full. Raise
    MissingError with the reason of the last."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_OTHERS}
    why: str | None = None
    for command in ways:
        log.unlink(missing_ok=True)
        _, why = run_to_end(command, environment, log, _LIMIT_S, f"took longer than {_LIMIT_S:.0f} s")
        if why is None:
            return
        if _NO_SPACE in log.read_text(errors="replace"):
            break
    raise MissingError(f"env create {name}: {_reason(log, str(why))}; nothing of it is left")


def _reason(log: Path, why: str) -> str:
    """Return why an installer failed, in words: what it says itself is long, and its last line often says the least."""
    text = log.read_text(errors="replace")
    if _NO_SPACE in text:
        cache = "UV_CACHE_DIR" if shutil.which("uv") else "TMPDIR"
        return f"{_NO_SPACE.lower()}: name a folder on another disk, set {cache} to one, or free some"
    if _NO_NETWORK.search(text):
        host = match[1] if (match := _HOST.search(text)) else "the package index"
        names = ("UV_DEFAULT_INDEX", "UV_FIND_LINKS") if shutil.which("uv") else ("PIP_INDEX_URL", "PIP_FIND_LINKS")
        return f"{host} was not reached: be online, or set {' or '.join(names)} to a mirror"
    if "ensurepip" in text:
        return "this Python cannot make environments: apt-get install python3-venv, or pip install uv"
    errors = [line.strip() for line in text.splitlines() if line.lower().startswith(("error", "  ×", "  ╰"))]
    return errors[-1][:300] if errors else why
