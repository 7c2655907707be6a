"""Figures of DPO pairs and of GRPO completions."""

from collections.abc import Sequence

from ftbench.core.rows import StepRow
from ftbench.core.stats import total

PARTS = ("generation", "scoring", "forward_backward", "optimizer")  # of a step with generation


def speed(steady: Sequence[StepRow]) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Return the mean seconds of each part of a step, and two token rates.

    `generated` is relative to the generation time. `trained` includes the prompts and is relative to the time of
    forward, backward and optimizer.
    """
    spent = {part: total(getattr(row, f"{part}_s") for row in steady) for part in PARTS}
    counts = {
        "generated": (total(row.generated_tokens for row in steady), spent["generation"]),
        "trained": (total(row.real_tokens for row in steady), spent["forward_backward"] + spent["optimizer"]),
    }
    rates: dict[str, float | None] = {
        name: tokens / seconds for name, (tokens, seconds) in counts.items() if seconds > 0
    }
    return {part: seconds / len(steady) for part, seconds in spent.items()}, rates


def rewards(everything: Sequence[StepRow]) -> dict[str, float | None]:
    """Return the accuracy and margin of the last step's pairs, and the first and last reward of completions."""
    train = [row for row in everything if row.phase == "train"]
    pairs = [row for row in train if row.reward_accuracy is not None]
    judged = [row.reward for row in train if row.reward is not None]
    figures = {name: getattr(pairs[-1], name) for name in ("reward_accuracy", "reward_margin")} if pairs else {}
    return figures | ({"reward_first": judged[0], "reward_last": judged[-1]} if judged else {})
