"""Examples → token ids with labels, through the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.worker.data.formats import Example

IGNORE = -100


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of one sample and which of them carry loss (`labels` is the id, or -100). `full_length` is the number of
    tokens before the sample was cut to `max_length`."""

    ids: list[int]
    labels: list[int]
    full_length: int


def tokenise(tokenizer: Any, example: Example, max_length: int, loss_on: str) -> Tokens:
    """One example; plain text, and everything with `loss_on` all, carries loss throughout."""
    if example.text is not None:
        ids = _encode(tokenizer, example.text, special=True)
        ids += [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        labels = list(ids)
    elif tokenizer.chat_template:
        ids, labels = _chat(tokenizer, example.messages)
    else:
        ids, labels = _plain_turns(tokenizer, example.messages)
    if loss_on == "all":
        labels = list(ids)
    return Tokens(ids[:max_length], labels[:max_length], len(ids))


def _encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Each assistant turn's tokens are those by which the dialogue grows when the turn is added to what stands before
    it, the template's opening of an answer included in what stands before."""
    ids = _template(tokenizer, messages, answer=False)
    labels = [IGNORE] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        begin = _common(ids, _template(tokenizer, messages[:turn], answer=True)) if turn else 0
        last = turn == len(messages) - 1
        end = len(ids) if last else _common(ids, _template(tokenizer, messages[: turn + 1], answer=False))
        labels[begin:end] = ids[begin:end]
    return ids, labels


def _template(tokenizer: Any, messages: Sequence[dict[str, str]], answer: bool) -> list[int]:
    return list(
        tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=answer, return_dict=False)
    )


def _common(longer: list[int], shorter: list[int]) -> int:
    """Length of the common beginning: a template may write a turn differently once another follows."""
    return next(
        (i for i, (a, b) in enumerate(zip(longer, shorter, strict=False)) if a != b), min(len(longer), len(shorter))
    )


def _plain_turns(tokenizer: Any, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
    """For a tokenizer without a chat template (a base model): turns separated by an empty line, answers ended."""
    ids: list[int] = []
    labels: list[int] = []
    for turn, message in enumerate(messages):
        learned = message["role"] == "assistant"
        part = _encode(tokenizer, message["content"] + ("" if learned else "\n\n"), special=turn == 0)
        if learned and tokenizer.eos_token_id is not None:
            part.append(tokenizer.eos_token_id)
        ids += part
        labels += part if learned else [IGNORE] * len(part)
    return ids, labels
