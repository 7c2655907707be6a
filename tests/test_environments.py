"""`ftbench env create` and `doctor --python`: environments of other frameworks, made by a stand-in for uv and looked at
through stand-ins for their interpreters. Real ones are made behind the marker `frameworks`."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from ftbench.errors import MissingError, SpecError
from ftbench.launch import environments, frameworks, process
from ftbench.spec.frameworks import FRAMEWORKS
from waiting import eventually

AXOLOTL = FRAMEWORKS["axolotl"]
WHOLE = {"versions": AXOLOTL.versions, "torch": {"version": "2.13.0+cpu", "works": False}, "problem": None}


def write_script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def interpreter(folder, said=WHOLE, version="0.19.0"):
    """A stand-in: it answers for axolotl's version, and for all that it has."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "said.json").write_text(json.dumps(said))
    script = f'[ "$#" -gt 3 ] && exec cat {folder}/said.json; [ "$3" = axolotl ] && exec echo {version}; exit 1'
    return write_script(folder / "bin/python", script)


@pytest.fixture
def uv(tmp_path, monkeypatch):
    """A stand-in that makes such an interpreter and installs nothing: `then` is what an installation does."""
    template = tmp_path / "template"
    interpreter(template)
    calls = tmp_path / "calls"
    calls.touch()

    def make(then="true"):
        script = f"""
echo "$@" >> {calls}
if [ "$1" = venv ]; then for last; do :; done; mkdir -p "$last/bin"; cp {template}/bin/python "$last/bin"; exit; fi
{then}"""
        write_script(tmp_path / "tools/uv", script)
        monkeypatch.setenv("PATH", f"{tmp_path}/tools:{os.environ['PATH']}")
        return calls

    return make


def ftbench(*arguments, env=None):
    return warm.run(arguments, env or {**os.environ})


def test_torch_comes_first_and_then_what_was_tried_and_nothing_else(uv, tmp_path):
    calls = uv()
    ended = ftbench("env", "create", "axolotl", tmp_path / "made", env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert (ended.returncode, ended.stdout.strip()) == (0, str(tmp_path / "made/bin/python")), ended.stderr
    made, torch, packages = calls.read_text().splitlines()
    assert made.endswith(str(tmp_path / "made"))
    assert torch.endswith("torch==2.13.0+cpu")
    assert f"--no-deps -r {AXOLOTL.file}" in packages
    assert not (tmp_path / "made" / frameworks.UNFINISHED).exists()
    assert frameworks.interpreter_problem(ended.stdout.strip()) is None


def test_a_torch_for_the_cpu_is_looked_for_where_torch_keeps_them_if_not_at_hand(uv, tmp_path):
    calls = uv('case "$*" in *torch-backend*) exit 0;; *+cpu*) echo "error: no version" >&2; exit 1;; esac')
    environments.create("axolotl", tmp_path / "made", lambda text: None)
    assert [line.split()[-1] for line in calls.read_text().splitlines() if "torch==" in line] == [
        "torch==2.13.0+cpu",
        "cpu",
    ]


def test_what_a_framework_imports_and_has_no_use_for_is_an_empty_module(uv, tmp_path):
    packages = tmp_path / "made/lib/python3.11/site-packages"
    uv(f"mkdir -p {packages}")
    environments.create("llamafactory", tmp_path / "made", lambda text: None)
    assert [(path.name, path.read_text()) for path in packages.iterdir()] == [("torchaudio.py", "")]


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (
            "echo 'error: Temporary failure in name resolution' >&2; exit 2",
            "the package index was not reached: be online, or set UV_DEFAULT_INDEX or UV_FIND_LINKS",
        ),
        (
            "echo 'cause: error sending request for url (https://some.org/whl/cpu/torch/)' >&2; exit 2",
            "some.org was not reached",
        ),
        (
            'case "$*" in *torch-backend*) echo "dns error";; *) echo "No space left on device";; esac; exit 2',
            "name a folder on another disk, set UV_CACHE_DIR to one",
        ),
        ("echo 'OSError: [Errno 28] No space left on device' >&2; exit 2", "name a folder on another disk"),
        ("echo 'error: No solution found for torch' >&2; exit 1", "error: No solution found for torch"),
        ("exit 7", "ended with exit code 7"),
    ],
)
def test_what_the_installer_met_is_said_in_a_sentence_and_nothing_is_left(uv, tmp_path, then, said):
    uv(then)
    with pytest.raises(MissingError, match=said):
        environments.create("axolotl", tmp_path / "made", lambda text: None)
    assert not (tmp_path / "made").exists()


def test_an_installer_that_prints_for_ever_is_ended_before_the_disk_is_full(uv, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_MOST_LOG", 1 << 20)
    uv("yes | head -c 2000000; sleep 900")
    with pytest.raises(MissingError, match="env create axolotl: prints without end; nothing of it is left"):
        environments.create("axolotl", tmp_path / "made", lambda text: None)
    assert not (tmp_path / "made").exists()


def test_too_little_room_is_known_before_anything_is_fetched(uv, tmp_path, monkeypatch):
    calls = uv()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**30}))
    with pytest.raises(MissingError, match=r"needs about \d GiB and 1.0 GiB are free: name a folder on another disk"):
        environments.create("axolotl", tmp_path / "made", lambda text: None)
    assert calls.read_text() == ""
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_there_already_is_left_alone(uv, tmp_path, kind):
    uv()
    place = tmp_path / "made"
    {"folder": place.mkdir, "file": place.touch, "link": lambda: place.symlink_to("/nowhere")}[kind]()
    with pytest.raises(SpecError, match="exists already; name another folder"):
        environments.create("axolotl", place, lambda text: None)
    assert os.path.lexists(place)


def test_an_unknown_framework_is_told_with_the_nearest():
    with pytest.raises(SpecError, match=r"did you mean axolotl\?"):
        environments.create("axolot", None, lambda text: None)


def test_a_trainer_that_cannot_be_imported_is_no_environment(uv, tmp_path):
    uv()
    interpreter(tmp_path / "template", WHOLE | {"problem": "ImportError: no triton"})
    uv(f"cp {tmp_path}/template/said.json {tmp_path}/said.json")
    with pytest.raises(MissingError, match="its trainer cannot be imported: ImportError: no triton"):
        environments.create("axolotl", tmp_path / "made", lambda text: None)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_was_ended_half_way_is_never_taken_for_whole_and_is_made_anew(uv, tmp_path, number):
    uv(f"touch {tmp_path}/installing; sleep 60")
    place = tmp_path / "made"
    running = subprocess.Popen(
        [sys.executable, "-m", "ftbench", "env", "create", "axolotl", str(place)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    eventually((tmp_path / "installing").exists)
    running.send_signal(number)
    assert running.wait(300) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    if number == signal.SIGKILL:
        assert frameworks.interpreter_problem(str(place / "bin/python")) == "its environment was never finished"
        (place / "of before").mkdir()
    else:
        assert not place.exists()
    uv()
    assert environments.create("axolotl", place, lambda text: None) == place / "bin/python"
    assert frameworks.interpreter_problem(str(place / "bin/python")) is None
    assert not (place / "of before").exists()


def test_an_environment_that_another_process_is_making_is_left_to_it(uv, tmp_path):
    uv()
    mark = tmp_path / "made" / frameworks.UNFINISHED
    mark.parent.mkdir()
    with mark.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SpecError, match="another ftbench is making it"):
            environments.create("axolotl", mark.parent, lambda text: None)
    assert mark.exists()


# --- doctor ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "version", "code", "words"),
    [
        (WHOLE, "0.19.0", 0, ["0.19.0, as tried", "all 128 are of the versions that were tried", "can be imported"]),
        (
            WHOLE | {"versions": AXOLOTL.versions | {"axolotl": "0.21.0"}}, "0.21.0", 0,
            ["0.21.0, and 0.19.0 is what was tried"],
        ),
        (
            WHOLE | {"versions": {"axolotl": "0.19.0", "trl": "1.15.0"}}, "0.19.0", 0,
            ["accelerate missing (1.13.0)", "more: what works beside them is not known"],
        ),
        (WHOLE | {"problem": "ImportError: no triton"}, "0.19.0", 3, ["cannot be imported: ImportError: no triton"]),
        ("?", "0.19.0", 3, ["does not answer as Python does"]),
    ],
)  # fmt: skip
def test_the_doctor_looks_at_an_environment(tmp_path, said, version, code, words):
    python = interpreter(tmp_path, said, version)
    ended = ftbench("doctor", "--python", python, "--wide")
    assert ended.returncode == code, ended.stdout + ended.stderr
    text = " ".join(ended.stdout.split())
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("python", "said"), [("/nowhere/bin/python", "no such interpreter"), (sys.executable, "has none of axolotl")]
)
def test_the_doctor_says_how_to_make_what_is_not_there(python, said):
    ended = ftbench("doctor", "--python", python, "--wide")
    assert ended.returncode == 3
    assert said in ended.stdout
    assert "ftbench env create" in ended.stdout


def test_one_environment_at_a_time_is_looked_at(tmp_path):
    ended = ftbench("doctor", tmp_path / "x.yaml", "--python", sys.executable)
    assert ended.returncode == 2
    assert "leave one of the two out" in ended.stderr


# --- what was tried --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_environment_has_what_records_a_run_there(name):
    beside = {"nvidia-ml-py", "psutil", "pydantic", "pyyaml", "numpy", "datasets", "transformers", "peft"}
    assert beside <= FRAMEWORKS[name].versions.keys()


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_page_says_the_versions_that_are_installed(name):
    framework = FRAMEWORKS[name]
    page = (Path(__file__).parents[1] / "docs/how-to/other-frameworks.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    beside = [f"{package} {framework.versions[package]}" for package in ("transformers", "trl", "peft", "datasets")]
    assert row == f"| `{name}` | {framework.version} | {', '.join(beside)} |"
    assert not {"torch", "triton", "pip"} & framework.versions.keys()  # as the machine needs them


@pytest.mark.frameworks
def test_a_real_environment_is_made_and_found_whole(tmp_path):
    if "FTBENCH_FRAMEWORKS" not in os.environ:
        pytest.skip("FTBENCH_FRAMEWORKS is not set: gigabytes are fetched for this")
    made = ftbench("env", "create", "llamafactory", tmp_path / "made")
    assert made.returncode == 0, made.stderr
    assert ftbench("doctor", "--python", made.stdout.strip()).returncode == 0
