"""Shared fixtures. Property tests use fixed examples without a deadline. Real runs share a cache for this session."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer.main
from hypothesis import settings

from ftbench import cli
from ftbench.core import table
from ftbench.core.table import show_in_full
from ftbench.estimate.time import history
from ftbench.store import rundir

WITH_TORCH = {"worker", "gpu"}  # the folders of tests that all need it
collect_ignore = [] if importlib.util.find_spec("torch") else [*WITH_TORCH]
# Before anything imports torch: threads that wait for each other cost test processes side by side most of their time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # no GPU; Triton reads it on import
settings.register_profile("ftbench", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("ftbench")


def pytest_report_header() -> str | None:
    return "without the training libraries: tests/worker and tests/gpu are left out" if collect_ignore else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without a test that needs torch where only such are run: reading them takes each process seconds."""
    if not config.option.markexpr.startswith("torch") or not collection_path.name.startswith("test_"):
        return None
    return None if WITH_TORCH & {*collection_path.parts} or "mark.torch" in collection_path.read_text("utf-8") else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import test modules without garbage collection, which takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests in the folders that need torch, keep tests that share a module fixture in one process, and start with
    slow tests."""
    for item in items:
        if WITH_TORCH & {*item.path.relative_to(Path(__file__).parent).parts}:
            item.add_marker("torch")
        if any(each[-1].scope == "module" for each in item._fixtureinfo.name2fixturedefs.values()):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))
    items.sort(key=lambda item: not (item.get_closest_marker("slow") or item.get_closest_marker("xdist_group")))


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, which each training runs."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def signals() -> None:
    """Let child processes receive hangup and Ctrl-C even if the suite runs under nohup or in the background."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _committed_runs() -> Iterator[None]:
    """Read each of the thousand committed runs once per process: estimates would read them again for each command."""
    results = f"{Path(__file__).parents[1]}/results/"
    find, timed, read = rundir.find_runs, history.timed_run, rundir.read_json

    @functools.cache
    def found(path: str) -> list[rundir.RunDir]:
        return find(Path(path))

    @functools.cache
    def summary(path: str) -> dict[str, object]:
        return read(rundir.RunDir(Path(path)).summary)

    @functools.cache
    def run(path: str) -> history.TimedRun | None:
        return timed(rundir.RunDir(Path(path)), lambda summary: True)

    def is_committed(path: Path) -> bool:
        return f"{os.path.abspath(path)}/".startswith(results)  # faster than methods of Path, and called 100,000 times

    def timed_run(each: rundir.RunDir, wanted: Callable[[dict[str, object]], bool]) -> history.TimedRun | None:
        if not is_committed(each.path):
            return timed(each, wanted)
        known = run(str(each.path))
        return known if known and wanted(summary(str(each.path))) else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rundir, "find_runs", lambda path: [*found(str(path))] if is_committed(path) else find(path))
        patch.setattr(history, "timed_run", timed_run)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_parser() -> Iterator[None]:
    """Build the parser of the command line once per process, not 0.1 s for each command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def _unlimited_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print all columns of tables, whatever the shell exports and earlier commands in this process did."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(table, "_PIPE", None)
    show_in_full(False)


@pytest.fixture
def ftbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Calls the command in this process and gives exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ftbench", *map(str, arguments)])
        interrupt = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as end:
            cli.main()
        signal.signal(signal.SIGINT, interrupt)  # a command that was interrupted leaves it to the system
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """FTBENCH_CACHE for this session, also for the processes that it starts."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FTBENCH_CACHE", str(folder))
        yield folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "ftbench-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs to mount a small disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def few_ways(monkeypatch):
    """Three recipes and no combinations: enough for recommendations that do not depend on the training variants."""
    from ftbench.estimate.recommend import candidates
    from ftbench.spec.load import shipped_recipes

    few = {name: shipped_recipes()[name] for name in ("fastest", "small", "smallest")}
    monkeypatch.setattr(candidates, "_combined", lambda *_: ())
    monkeypatch.setattr(candidates, "shipped_recipes", lambda: few)
