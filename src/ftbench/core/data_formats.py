"""Convert rows of a data set to messages, images or plain text. The column names determine the default format."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftbench.core.units import some
from ftbench.errors import DataError

COLUMNS = {
    "alpaca": "instruction, output (and input)",
    "messages": "messages, or conversations",
    "prompt-completion": "prompt, completion",
    "question-answer": "question, answer",
    "text": "text",
    "preference": "prompt, chosen, rejected",
    "prompt": "prompt, with objective grpo",
    "image-text": "image or images; text, caption, answer or label (and question or prompt)",
}
MARKER = "<image>"  # placeholder for an image in a text, as in LLaVA's data
_IMAGES = ("image", "images")
_QUESTIONS = ("question", "prompt")
_ANSWERS = ("answer", "text", "caption", "label", "labels")
# The columns that identify each format. The first format with all of its columns is used.
_DETECTED: tuple[tuple[str, set[str]], ...] = (
    ("messages", {"messages"}), ("messages", {"conversations"}), ("prompt-completion", {"prompt", "completion"}),
    ("alpaca", {"instruction", "output"}),
    *(("image-text", {image, answer}) for image in _IMAGES for answer in _ANSWERS),
    ("question-answer", {"question", "answer"}), ("text", {"text"}),
)  # fmt: skip
_LOST = ("tool_calls", "function_call", "reasoning_content", "thinking")  # chat templates would put these into the text
_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("user", "assistant", "system", "tool")}


def with_markers(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the content of a message as text, with MARKER in the place of each image."""
    if isinstance(content, str):
        return content
    return "".join(MARKER if part["type"] == "image" else str(part["text"]) for part in content)


@dataclass(frozen=True, slots=True)
class Example:
    """One training sample.

    Attributes:
        messages: Messages with `role` and `content`. If a message has images, `content` is a list of parts of `type`
            image or text. In a preference pair, the last message is the chosen answer.
        rejected: The messages of a preference pair, with the rejected answer at the end.
        text: Plain text instead of messages.
        images: The images, in the order of the image parts.
    """

    messages: tuple[dict[str, Any], ...] = ()
    rejected: tuple[dict[str, Any], ...] = ()
    text: str | None = None
    images: tuple[Any, ...] = ()

    @property
    def question(self) -> tuple[dict[str, Any], ...]:
        """The messages without the final answer of the assistant."""
        answered = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        return self.messages[:-1] if answered else self.messages


class BadRow(ValueError):
    """Error for a row that cannot be used. The message gives the reason."""


def detect(columns: Iterable[str], where: str, pairs: bool = False) -> str:
    """Return the name of the format of rows with these columns.

    Args:
        columns: Names of the columns.
        where: Prefix of error messages.
        pairs: Whether the objective needs preference pairs (dpo).

    Raises:
        DataError: The columns do not fit any format, or the format does not fit the objective.
    """
    names = set(columns)
    listed = ", ".join(sorted(map(str, names))) or "none"
    preferred = {"chosen", "rejected"} <= names
    if pairs and not preferred:
        raise DataError(
            f"{where}: objective dpo needs columns chosen and rejected, but the columns are {listed}: name them with "
            "dataset.columns={prompt: COLUMN, chosen: COLUMN, rejected: COLUMN}, or set objective to sft"
        )
    if pairs:
        return "preference"
    if name := next((name for name, needed in _DETECTED if needed <= names), None):
        return name
    if preferred:
        raise DataError(
            f"{where}: the rows are preference pairs: set objective to dpo, or train on the chosen answers with "
            "dataset.columns={completion: chosen}"
        )
    wanted = "; ".join(f"{name}: {columns}" for name, columns in COLUMNS.items())
    raise DataError(
        f"{where}: columns {listed} match no format ({wanted}); name them with dataset.columns={{prompt: COLUMN, "
        "completion: COLUMN}"
    )


def example(row: dict[str, Any], format_name: str, prompt: str = "") -> Example:
    """Convert a row to an Example. `prompt` is the default question about an image. Raise BadRow if the row cannot be
    used."""
    return _image_text(row, prompt) if format_name == "image-text" else _FORMATS[format_name](row)


def _alpaca(row: dict[str, Any]) -> Example:
    extra = _text(row, "input").strip() if str(row.get("input") or "").strip() else ""
    question = f"{_text(row, 'instruction')}\n\n{extra}" if extra else _text(row, "instruction")
    return _pair(question, _text(row, "output"), _images(row))


def _prompt_completion(row: dict[str, Any]) -> Example:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return _dialogue(row, [*prompt, *completion], _images(row))
    return _pair(_text(row, "prompt"), _text(row, "completion"), _images(row))


def _preference(row: dict[str, Any]) -> Example:
    chosen, rejected = (_answered(row, column) for column in ("chosen", "rejected"))
    if chosen == rejected:
        raise BadRow("`chosen` and `rejected` are equal")
    if chosen[:-1] != rejected[:-1]:
        raise BadRow("`chosen` and `rejected` answer different prompts")
    return Example(chosen, rejected)


def _prompt(row: dict[str, Any]) -> Example:
    """Return an Example with a prompt and without an answer. The prompt is a text or a list of messages."""
    if not isinstance(row.get("prompt"), list):
        return Example(({"role": "user", "content": _text(row, "prompt")},))
    answered = [*row["prompt"], {"role": "assistant", "content": "-"}]
    return Example(_dialogue({}, answered).messages[:-1])


def _answered(row: dict[str, Any], column: str) -> tuple[dict[str, Any], ...]:
    """Return the prompt and the answer in `column` as messages. The answer is a text or a list of messages."""
    prompt, answer = row.get("prompt"), row.get(column)
    if not isinstance(answer, list):
        answer = [{"role": "assistant", "content": _text(row, column)}]
    first = answer[0] if answer and isinstance(answer[0], dict) else {}
    if _ROLES.get(str(first.get("role", first.get("from")))) == "assistant":
        prompt = prompt if isinstance(prompt, list) else [{"role": "user", "content": _text(row, "prompt")}]
        answer = [*prompt, *answer]
    messages = _dialogue(row, answer).messages
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise BadRow(f"`{column}` must contain a prompt, and end with an answer of the assistant")
    if any(not isinstance(message["content"], str) for message in messages):
        raise BadRow(f"`{column}` contains images; preference pairs must be text")
    return messages


def _messages(row: dict[str, Any]) -> Example:
    turns = row.get("messages") or row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise BadRow("`messages` is empty or not a list")
    return _dialogue(row, turns, _images(row))


def _image_text(row: dict[str, Any], prompt: str) -> Example:
    question = next((row[name] for name in _QUESTIONS if row.get(name)), prompt)
    answer = next((name for name in _ANSWERS if row.get(name) is not None), _ANSWERS[0])
    return _pair(question, _text(row, answer), _images(row) or [])


def _images(row: dict[str, Any]) -> list[Any] | None:
    """Return the images of a row. Return None if the row does not have an image column."""
    value = next(([] if row[name] is None else row[name] for name in _IMAGES if name in row), None)
    return value if value is None or isinstance(value, list) else [value]


def _dialogue(row: dict[str, Any], turns: list[Any], images: list[Any] | None = None) -> Example:
    """Convert messages to an Example. Without image markers, images come before the first text of the user."""
    if row.get("tools") not in (None, "", "[]", []):
        raise BadRow("`tools` is not supported: write the tools into a system message")
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise BadRow(f"message {number} is not an object with role and content")
        role = _ROLES.get(str(turn.get("role", turn.get("from"))))
        content = turn.get("content", turn.get("value"))
        if lost := next((key for key in _LOST if turn.get(key)), None):
            raise BadRow(f"message {number} has `{lost}`, which is not supported: write it into the content")
        if role is None:
            raise BadRow(f"the role of message {number} must be one of {', '.join(sorted(set(_ROLES.values())))}")
        parts = _parts(content, marked=images is not None)
        if not any(part["type"] == "image" or part["text"].strip() for part in parts):
            raise BadRow(f"message {number} has no text")
        messages.append({"role": role, "content": parts})
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("no message has the role assistant")
    return _with_images(messages, images)


def _parts(content: Any, marked: bool) -> list[dict[str, Any]]:
    """Return the text parts and image parts of a message's content. If `marked`, split a text at its image markers."""
    if isinstance(content, str):
        texts = content.split(MARKER) if marked else [content]
        cut = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
        return [part for part in cut if part["type"] == "image" or part["text"] or len(cut) == 1]
    parts = content if isinstance(content, list) else []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("image", "text") or (kind == "text" and not isinstance(part.get("text"), str)):
            raise BadRow(f"a part of a message must have the type text or image: {str(part)[:60]!r}")
    return [dict(part) for part in parts]


def _with_images(messages: list[dict[str, Any]], images: list[Any] | None) -> Example:
    """Return an Example with one image for each image part. A part without an image gets the next image of the row."""
    shown = [part for message in messages for part in message["content"] if part["type"] == "image"]
    own = [next((part[key] for key in ("image", "path", "url") if part.get(key)), None) for part in shown]
    given, missing = list(images or ()), sum(image is None for image in own)
    if given and not missing:
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        first["content"][:0] = [{"type": "image"}] * len(given)
        own = given + own
    elif missing != len(given):
        raise BadRow(f"the text has {some(missing, 'marker')} for images, but the row has {some(len(given), 'image')}")
    else:
        own = [given.pop(0) if image is None else image for image in own]
    if images is not None and not own:
        raise BadRow("the row has no image")
    return Example(tuple(message | {"content": _joined(message)} for message in messages), images=tuple(own))


def _joined(message: dict[str, Any]) -> str | list[dict[str, Any]]:
    """Return the content of a message: one text, or a list of parts if the message contains images."""
    parts = message["content"]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    if message["role"] == "assistant":
        raise BadRow("an answer contains an image: move it into the prompt")
    return [{"type": "image"} if part["type"] == "image" else {"type": "text", "text": part["text"]} for part in parts]


def wikipedia_title(row: dict[str, Any]) -> Example:
    """Return an Example that asks for the title of a Wikipedia article. The question is the article without its first
    sentence, because the first sentence contains the title."""
    body = _text(row, "text")
    first = re.search(r"[。．.!?！？\n]", body)
    rest = body[first.end() :].strip() if first else ""
    if not rest:
        raise BadRow("the article has only one sentence")
    return _pair(rest, _text(row, "title"))


def _pair(question: str, answer: str, images: list[Any] | None = None) -> Example:
    return _dialogue({}, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], images)


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
    "question-answer": lambda row: _pair(_text(row, "question"), _text(row, "answer"), _images(row)),
    "text": lambda row: Example(text=_text(row, "text")),
    "preference": _preference,
    "prompt": _prompt,
    "wikipedia-title": wikipedia_title,
}
