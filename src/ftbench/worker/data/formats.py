"""A row → messages, or plain text. Formats are found from the columns unless the spec names one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ftbench.errors import DataError

COLUMNS = {
    "alpaca": "instruction, output (and input)",
    "messages": "messages, or conversations",
    "prompt-completion": "prompt, completion",
    "text": "text",
}
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True)
class Example:
    """Messages (`role`, `content`) whose assistant turns are what is learned, or plain `text`."""

    messages: tuple[dict[str, str], ...] = ()
    text: str | None = None


class BadRow(ValueError):
    """A row that cannot be used; the message says what is wrong with it."""


def detect(columns: Iterable[str], where: str) -> str:
    """Return the format that these columns belong to. Raises DataError for columns of none."""
    names = set(columns)
    if {"messages", "conversations"} & names:
        return "messages"
    if {"prompt", "completion"} <= names:
        return "prompt-completion"
    if {"instruction", "output"} <= names:
        return "alpaca"
    if "text" in names:
        return "text"
    wanted = "; ".join(f"{name}: {columns}" for name, columns in COLUMNS.items())
    raise DataError(f"{where}: columns {', '.join(sorted(map(str, names))) or 'none'} fit no format ({wanted})")


def example(row: dict[str, Any], format_name: str) -> Example:
    """Return the example in a row. Raises BadRow."""
    return _FORMATS[format_name](row)


def _alpaca(row: dict[str, Any]) -> Example:
    instruction, extra = _text(row, "instruction"), row.get("input")
    if extra is not None and not isinstance(extra, str):
        raise BadRow(f"`input` is {type(extra).__name__}, not text")
    question = f"{instruction}\n\n{extra.strip()}" if extra and extra.strip() else instruction
    return _pair(question, _text(row, "output"))


def _prompt_completion(row: dict[str, Any]) -> Example:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return _dialogue([*prompt, *completion])
    return _pair(_text(row, "prompt"), _text(row, "completion"))


def _messages(row: dict[str, Any]) -> Example:
    turns = row.get("messages") or row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise BadRow("`messages` is empty or no list")
    return _dialogue(turns)


def _dialogue(turns: list[Any]) -> Example:
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise BadRow(f"message {number} is no object with role and content")
        role = _ROLES.get(str(turn.get("role", turn.get("from"))))
        content = turn.get("content", turn.get("value"))
        if role is None:
            raise BadRow(f"message {number} has no role of {', '.join(sorted(set(_ROLES.values())))}")
        if not isinstance(content, str) or not content.strip():
            raise BadRow(f"message {number} has no text")
        messages.append({"role": role, "content": content})
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("no message of the assistant to learn from")
    return Example(tuple(messages))


def _plain(row: dict[str, Any]) -> Example:
    return Example(text=_text(row, "text"))


def wikipedia_title(row: dict[str, Any]) -> Example:
    """Return an article as the founding study uses it: the body without its first sentence is the question, the
    title the answer; the first sentence would give the title away."""
    body = _text(row, "text")
    first = re.search(r"[。．.!?！？\n]", body)
    rest = body[first.end() :].strip() if first else ""
    if not rest:
        raise BadRow("the article has one sentence only")
    return _pair(rest, _text(row, "title"))


def _pair(question: str, answer: str) -> Example:
    return Example(({"role": "user", "content": question}, {"role": "assistant", "content": answer}))


def _text(row: dict[str, Any], column: str) -> str:
    value = row.get(column)
    if value is None:
        raise BadRow(f"`{column}` is missing")
    if not isinstance(value, str):
        raise BadRow(f"`{column}` is {type(value).__name__}, not text")
    if not value.strip():
        raise BadRow(f"`{column}` is empty")
    return value


_FORMATS: dict[str, Callable[[dict[str, Any]], Example]] = {
    "alpaca": _alpaca,
    "messages": _messages,
    "prompt-completion": _prompt_completion,
    "text": _plain,
    "wikipedia-title": wikipedia_title,
}
