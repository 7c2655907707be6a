"""The allocator's own history as events: entries of the form that torch.cuda.memory._snapshot gives."""

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

from ftbench.worker.profile.memory import frame_of, from_entries

SITE = "/usr/lib/python3/site-packages"
FRAMES = [
    {"filename": f"{SITE}/torch/nn/functional.py", "line": 20, "name": "linear"},
    {"filename": f"{SITE}/torch/nn/modules/linear.py", "line": 30, "name": "forward"},
    {"filename": f"{SITE}/peft/tuners/lora/layer.py", "line": 1074, "name": "forward"},
    {"filename": f"{SITE}/transformers/models/qwen3/modeling_qwen3.py", "line": 81, "name": "forward"},
]


def entry(action, addr, size, time_us, frames=()):
    return {"action": action, "addr": addr, "size": size, "time_us": time_us, "stream": 0, "frames": list(frames)}


def test_blocks_are_given_back_when_they_are_asked_back():
    events = from_entries([
        entry("segment_alloc", 1000, 2**21, 9), entry("alloc", 1000, 512, 10, FRAMES),
        entry("free_requested", 1000, 512, 20), entry("free_completed", 1000, 512, 21), entry("snapshot", 0, 0, 22),
    ])  # fmt: skip
    assert [(event.time, event.address, event.size) for event in events] == [(10, 1000, 512), (20, 1000, -512)]
    assert events[0].frame == "peft/tuners/lora/layer.py:1074 forward"


def test_of_a_stack_the_innermost_known_frame_is_told():
    frames = [(each["filename"], each["line"], each["name"]) for each in FRAMES]
    assert frame_of(frames[3:]) == "transformers/models/qwen3/modeling_qwen3.py:81 forward"
    assert frame_of(frames[:2]) == ""
    assert frame_of([("/home/me/ftbench/src/ftbench/worker/profile/memory.py", 3, "start"), *frames[2:]]).startswith(
        "peft"
    )
    assert frame_of([]) == ""
