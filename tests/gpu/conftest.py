"""Fixtures of the GPU tests: each list of changes to the spec is trained once, with `ftbench run` as a user starts it.

`pytest -m gpu tests/gpu` prints at least one line per minute and ends within 9 minutes. Tests that passed at this
commit (of a clean checkout, or FTBENCH_COMMIT) are not repeated, so the same command resumes.
`-m "gpu and exhaustive"` runs the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from methods import LARGE, METHODS, SHARED, SPEC, no_gpu

from ftbench.store import machine

SIDE_BY_SIDE = max(1, min(8, (os.cpu_count() or 1) // 2))
QUIET_S, LAST_START_S = 45.0, 500.0  # a line after this time without a result; no test starts later
# First the tests that need the GPU for themselves: later tests use it in the process of pytest, until that ends.
ALONE = ("waits", "probe", "profile")
ORDER = (*ALONE, "kernels", "streams", "recipes", "frameworks", "memory", "images")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests, and leave out those that passed at this commit and, unless requested, the exhaustive ones."""
    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    if no_gpu() or not ours:
        return
    progress = Progress(config)
    left = [item for item in ours if item.nodeid in progress.passed
            or (item.get_closest_marker("exhaustive") and "exhaustive" not in config.option.markexpr)]  # fmt: skip
    config.hook.pytest_deselected(items=left)
    items[:] = sorted(
        (item for item in items if item not in left),
        key=lambda item: (not is_alone(item), ORDER.index(part(item))) if item in ours else (True, len(ORDER)),
    )  # fmt: skip
    config.pluginmanager.register(progress)


def part(item: pytest.Item) -> str:
    """Return what the tests of a file are about: `kernels` for test_kernels.py."""
    return item.path.stem.split("_")[-1]


def is_alone(item: pytest.Item) -> bool:
    """Return whether a test needs the GPU for itself."""
    return "alone" in item.fixturenames or part(item) in ALONE


class Progress:
    """Keeps the names of passed tests in a file per commit, prints a line while nothing happens, and ends in time."""

    def __init__(self, config: pytest.Config) -> None:
        commit = machine.commit() or ""
        self.file = config.rootpath / ".pytest_cache" / f"gpu-{commit[:12]}.txt"
        self.keeps = bool(commit) and not commit.endswith("-dirty")
        self.passed = {*self.file.read_text("utf-8").splitlines()} if self.keeps and self.file.is_file() else set()
        self.begin = self.printed = time.monotonic()
        self.out, self.test = os.dup(1), ""  # pytest redirects 1 while a test runs

    def pytest_collection_finish(self) -> None:
        os.write(self.out, f"{len(self.passed)} tests passed before at this commit\n".encode())
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        while True:
            time.sleep(1)
            if time.monotonic() > self.printed + QUIET_S:
                self.printed = time.monotonic()
                os.write(self.out, f" {self.printed - self.begin:.0f} s: waiting for {self.test}\n".encode())

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.test = item.name

    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if nextitem and time.monotonic() > self.begin + LAST_START_S:
            item.session.shouldstop = "9 minutes are over: repeat the command for the other tests"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.printed = time.monotonic()
        if report.when == "call" and report.passed and self.keeps:
            self.file.parent.mkdir(exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    """Runs the spec with changes in its own process: exit code and document."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "spec.yaml").write_text(SPEC)

    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4"} | os.environ  # several compile at a time
    environment.pop("OMP_NUM_THREADS", None)  # one thread is for small models on a CPU: weights here are drawn by all

    def started(*sets: str) -> tuple[int, dict]:
        changes = [part for text in sets for part in ("--set", text)]
        command = [sys.executable, "-m", "ftbench", "run", str(folder / "spec.yaml"), "--json", "--yes", *changes]
        command += ["--out", str(folder / "out")]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
        return ended.returncode, json.loads(ended.stdout)

    return started


@pytest.fixture(scope="session")
def run(request, train):
    """Each list of changes once, several at a time on the same GPU: for everything but speed."""
    pool = ThreadPoolExecutor(SIDE_BY_SIDE)
    asked = dict.fromkeys(sets for item in request.session.items for sets in needed(item))
    begun = {sets: pool.submit(train, SHARED, *sets) for sets in asked}

    def once(*sets: str) -> tuple[int, dict]:
        if sets not in begun:
            begun[sets] = pool.submit(train, SHARED, *sets)
        return begun[sets].result()

    yield once
    pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def _begun(request):
    """Train while the tests of kernels and streams run, but after those that need the GPU for themselves."""
    if not is_alone(request.node) and not no_gpu() and any(map(needed, request.session.items)):
        request.getfixturevalue("run")


def needed(item: pytest.Item) -> list[tuple[str, ...]]:
    """The lists of changes that a test looks at, by the names in its parameters `name`, or `there` and `away`. For
    tests of images, all runs of the module."""
    if "summary" in item.fixturenames:
        return item.module.RUNS
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if "away" in parameters:
        return [METHODS[parameters[each]] for each in ("there", "away")]
    name = parameters.get("name")
    if name in LARGE:
        return [LARGE[name]]
    return [(), METHODS[name]] if name in METHODS else []


@pytest.fixture(scope="session")
def alone(train):
    """Each list of changes once, with the GPU to itself."""
    done: dict[tuple[str, ...], tuple[int, dict]] = {}

    def once(*sets: str) -> tuple[int, dict]:
        if sets not in done:
            done[sets] = train(*sets)
        return done[sets]

    return once
