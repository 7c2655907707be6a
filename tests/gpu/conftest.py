"""Fixtures of the GPU tests: each list of changes to the spec is trained once, with `ftbench run` as a user starts
it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest
from methods import LARGE, METHODS, SHARED, SPEC

SLOW = ("unsloth", "compile", "recipe", "gpt-oss-20b")  # started first, because they take longest
SIDE_BY_SIDE = max(1, min(6, (os.cpu_count() or 1) // 3))


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
    slow_first = sorted(asked, key=lambda sets: not any(word in text for text in sets for word in SLOW))
    begun = {sets: pool.submit(train, SHARED, *sets) for sets in slow_first}

    def begin(*sets: str) -> Future:
        if sets not in begun:
            begun[sets] = pool.submit(train, SHARED, *sets)
        return begun[sets]

    def once(*sets: str) -> tuple[int, dict]:
        return begin(*sets).result()

    once.begin = begin
    once.rest = lambda: wait(begun.values())
    yield once
    pool.shutdown(cancel_futures=True)


def needed(item: pytest.Item) -> list[tuple[str, ...]]:
    """The lists of changes that a test with a method's name looks at."""
    name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    if name in LARGE:
        return [LARGE[name]]
    if name not in METHODS:
        return []
    return [(), METHODS[name]]


@pytest.fixture(scope="session")
def alone(run, train):
    """Each list of changes once, with the GPU to itself."""
    done: dict[tuple[str, ...], tuple[int, dict]] = {}

    def once(*sets: str) -> tuple[int, dict]:
        run.rest()
        if sets not in done:
            done[sets] = train(*sets)
        return done[sets]

    return once
