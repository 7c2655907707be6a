import pytest

from ftbench.core.allocations import CATEGORIES, AllocationHistory, Event, by_category
from ftbench.core.units import GIB

MIB = 2**20
WEIGHTS, ADAPTERS, STATE, GRADIENT, SAVED, LOGITS, BATCH, FREED = range(1, 9)


def history(**changed):
    """One step in MiB: weights 100, adapters 4 and the optimizer's state 8 throughout; a batch of 1 is held before the
    step and given back in it; the forward pass keeps 30 for the backward pass and uses 50 for a moment."""
    values = {
        "events": [
            Event(10, SAVED, 30 * MIB, "modeling.py:1 forward"),
            Event(20, LOGITS, 50 * MIB, "loss.py:2 loss"),
            Event(25, LOGITS, -50 * MIB),
            Event(40, GRADIENT, 4 * MIB, "engine.py:3 backward"),
            Event(41, BATCH, -1 * MIB),
            Event(50, SAVED, -30 * MIB),
            Event(70, FREED, 2 * MIB, "adamw.py:4 step"),
            Event(75, FREED, -2 * MIB),
            Event(90, GRADIENT, -4 * MIB),
        ],
        "alive": [(WEIGHTS, 100 * MIB), (ADAPTERS, 4 * MIB), (STATE, 8 * MIB)],
        "marks": [(0, "data"), (5, "forward"), (30, "backward"), (60, "optimizer")],
        "owners": {WEIGHTS: "weights", ADAPTERS: "adapters", STATE: "optimizer"},
        "gradients": {GRADIENT},
        "gradients_at": 60.0,
    }  # fmt: skip
    return AllocationHistory(**values | changed)


def mib(point):
    return {name: round(point[name] * GIB / MIB) for name in CATEGORIES if point[name]}


def test_the_peak_is_split_into_categories():
    found = by_category(history())
    assert mib(found["peak"]) == {
        "weights": 100,
        "adapters": 4,
        "optimizer": 8,
        "activations": 30,
        "temporary": 50,
        "other": 1,
    }
    assert found["peak"]["phase"] == "forward"
    assert found["peak"]["at_ms"] == pytest.approx(0.010)
    assert found["peak"]["total_gb"] * GIB / MIB == pytest.approx(193)


def test_live_blocks_name_their_allocating_line():
    alive = by_category(history())["alive"]
    assert [(each["category"], each["made_by"], round(each["gb"] * GIB / MIB)) for each in alive] == [
        ("weights", None, 100), ("temporary", "loss.py:2 loss", 50), ("activations", "modeling.py:1 forward", 30),
        ("optimizer", None, 8), ("adapters", None, 4), ("other", None, 1),
    ]  # fmt: skip


def test_gradients_are_the_blocks_before_the_optimizer_step():
    timeline = by_category(history())["timeline"]
    at_update = [point for point in timeline if point["phase"] == "optimizer"]
    assert mib(at_update[0])["gradients"] == 4
    assert "gradients" not in mib(timeline[-1])


def test_a_reused_address_is_another_tensor():
    again = [Event(95, GRADIENT, 7 * MIB, "x.py:1 f")]
    found = by_category(history(events=[*history().events, *again]))
    assert mib(found["end"]) == {"weights": 100, "adapters": 4, "optimizer": 8, "temporary": 7}


def test_categories_add_up_to_the_allocated_memory():
    found = by_category(history())
    for point in (found["start"], found["end"], found["peak"], *found["timeline"]):
        assert sum(point[name] for name in CATEGORIES) == pytest.approx(point["total_gb"])
    assert mib(found["start"]) == {"weights": 100, "adapters": 4, "optimizer": 8, "other": 1}
    assert mib(found["end"]) == {"weights": 100, "adapters": 4, "optimizer": 8}


def test_activations_belong_to_their_forward_pass():
    events = [Event(10, 21, 5 * MIB), Event(50, 21, -5 * MIB), Event(110, 22, 6 * MIB), Event(120, 22, -6 * MIB)]
    marks = [(5, "forward"), (30, "backward"), (105, "forward"), (130, "backward")]
    found = by_category(history(events=events, marks=marks, gradients=()))
    assert max(mib(point).get("activations", 0) for point in found["timeline"]) == 5
    assert max(mib(point).get("temporary", 0) for point in found["timeline"]) == 6


def test_a_step_without_allocations_shows_live_blocks():
    found = by_category(history(events=[], gradients=()))
    assert mib(found["peak"]) == {"weights": 100, "adapters": 4, "optimizer": 8}


def test_the_timeline_has_few_points_and_keeps_the_maximum():
    events = [
        event
        for i in range(3000)
        for event in (Event(i * 10, 50 + i, MIB * (i % 97)), Event(i * 10 + 5, 50 + i, -MIB * (i % 97)))
    ]
    found = by_category(history(events=events, marks=[]))
    assert len(found["timeline"]) < 300
    assert max(point["total_gb"] for point in found["timeline"]) == found["peak"]["total_gb"]
