"""Convert examples to token ids and labels with the chat template of the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np

from ftbench.core.data_formats import BadRow, Example
from ftbench.core.units import some
from ftbench.errors import DataError, FtbenchError
from ftbench.worker.data.images import Picture, SampleImages

IGNORE = -100


@dataclass(frozen=True, slots=True)
class Tokens:
    """One tokenized sample. For a preference pair, `ids` and `labels` belong to the chosen sequence."""

    ids: list[int]
    labels: list[int]  # the token id at positions with a loss, otherwise IGNORE
    full_length: int  # number of tokens before truncation to `max_length`
    pictures: tuple[Picture, ...] = ()
    rejected: Tokens | None = None  # the rejected sequence of a pair
    row: Mapping[str, Any] | None = None  # for GRPO: the row of the prompt in the data set

    @property
    def sequences(self) -> list[Tokens]:
        """Return the sequences that the model processes: two for a preference pair, otherwise one."""
        return [self] if self.rejected is None else [self, self.rejected]

    @property
    def longest(self) -> int:
        return max(len(each.ids) for each in self.sequences)

    @property
    def learns(self) -> bool:
        """Return whether the sample is usable: each sequence has labels, and the sequences of a pair differ."""
        same = self.rejected is not None and self.ids == self.rejected.ids
        return not same and all(any(label != IGNORE for label in each.labels[1:]) for each in self.sequences)


Row = list[Tokens]  # the samples in one row of a batch


def tokenise(
    tokenizer: Any, example: Example, max_length: int, loss_on: str, images: SampleImages | None = None
) -> Tokens:
    """Return the tokens of an example. Plain text or `loss_on="all"`: all tokens except image tokens have labels.

    Raises:
        BadRow: The number of image markers in the text differs from the number of images.
    """
    if example.text is not None:
        ids = _encode(tokenizer, example.text, special=True)
        ids += [tokenizer.eos_token_id] if tokenizer.eos_token_id not in (None, *ids[-1:]) else []
        labels = list(ids)
    else:
        ids, labels = (_chat if tokenizer.chat_template else _plain_turns)(tokenizer, example.messages)
    labels = list(ids) if loss_on == "all" else labels
    if images:
        ids, labels = _expand_images(ids, labels, images)
    return Tokens(ids[:max_length], labels[:max_length], len(ids), images.pictures if images else ())


def tokenise_pair(tokenizer: Any, example: Example, max_length: int) -> Tokens:
    """Return the tokens of the chosen sequence. The attribute `rejected` contains the rejected sequence.

    The labels of both sequences start at the first position where one sequence differs from the prompt. trl's
    DPOTrainer uses the same rule.
    """
    prompt = _dialogue(tokenizer, example.messages[:-1], True)
    rendered = [_dialogue(tokenizer, messages, False) for messages in (example.messages, example.rejected)]
    begin = min(_common(prompt, ids) for ids in rendered)
    labels = [[IGNORE] * begin + ids[begin:] for ids in rendered]
    chosen, rejected = (
        Tokens(ids[:max_length], own[:max_length], len(ids)) for ids, own in zip(rendered, labels, strict=True)
    )
    return replace(chosen, rejected=rejected)


def tokenise_prompt(tokenizer: Any, example: Example) -> Tokens:
    """Return the tokens before the last answer, with the generation prompt. Raise BadRow for plain text."""
    if not example.question:
        raise BadRow("it has no prompt: set dataset.format=prompt and dataset.columns={prompt: COLUMN}")
    ids = _dialogue(tokenizer, example.question, True)
    return Tokens(ids, [IGNORE] * len(ids), len(ids))


@contextmanager
def name_errors(where: str) -> Iterator[None]:
    """Convert an error of the tokenizer or its chat template to a DataError. `where` names the row in the message."""
    try:
        yield
    except BadRow as error:
        raise DataError(f"{where}: {error}") from None
    except (MemoryError, FtbenchError):
        raise
    except Exception as error:  # noqa: BLE001
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise DataError(f"{where}: the tokenizer or its chat template failed ({reason})") from None


def render(tokenizer: Any, messages: Sequence[dict[str, Any]], answer: bool = False) -> str:
    """Return the dialogue as text, with a fixed date where templates print it. `answer`: add a generation prompt."""
    if getattr(tokenizer, "takes_parts", False):  # templates of LLaVA read only lists of parts
        messages = [
            each | ({"content": [{"type": "text", "text": text}]} if isinstance(text := each["content"], str) else {})
            for each in messages
        ]
    options = {"tokenize": False, "add_generation_prompt": answer, "strftime_now": date(2025, 1, 1).strftime}
    return str(tokenizer.apply_chat_template(list(messages), **options))


def _encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _template(tokenizer: Any, messages: Sequence[dict[str, str]], answer: bool) -> list[int]:
    return _encode(tokenizer, render(tokenizer, messages, answer), special=False)


def _expand_images(ids: list[int], labels: list[int], images: SampleImages) -> tuple[list[int], list[int]]:
    """Return ids and labels. Image token i is repeated `images.counts[i]` times. Image tokens have no label."""
    places = np.flatnonzero(np.array(ids) == images.token)
    if len(places) != len(images.counts):
        raise BadRow(
            f"its text has {some(len(places), 'marker')} of images, and the row has {some(len(images.counts), 'image')}"
        )
    masked, times = np.array(labels), np.ones(len(ids), dtype=int)
    masked[places], times[places] = IGNORE, images.counts
    return np.repeat(ids, times).tolist(), np.repeat(masked, times).tolist()


def _chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return ids and labels of a dialogue. Each answer and the tokens that end it (such as `<|im_end|>`) have labels.

    To find the start of an answer, render the earlier turns with the generation prompt. The answer starts after the
    common prefix of this text and the dialogue. To find the end, change the answer: the tokens after the answer stay
    the same. Some templates render the last turn differently, so a shorter dialogue is not always a prefix.
    """
    ids = _template(tokenizer, messages, answer=False)
    labels = [IGNORE] * len(ids)
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    until = messages[: answers[-1] + 1]
    ended = ids if len(until) == len(messages) else _template(tokenizer, until, answer=False)
    closing = ended[_end_of_content(tokenizer, until, answers[-1], ended) :]
    for turn in answers:
        begin = _common(ids, _template(tokenizer, messages[:turn], answer=True)) if turn else 0
        end = len(ids) if turn == len(messages) - 1 else _end_of_content(tokenizer, messages, turn, ids)
        closed = end + _common(ids[end:], closing)
        labels[begin:closed] = ids[begin:closed]
    return ids, labels


def _end_of_content(tokenizer: Any, messages: Sequence[dict[str, str]], turn: int, ids: list[int]) -> int:
    """Return the index in `ids` after the text of a turn. The tokens from this index on do not depend on the text."""
    content = messages[turn]["content"]
    mark = "!" if content.rstrip().endswith("?") else "?"
    other = [*messages[:turn], messages[turn] | {"content": f"{content} {mark}"}, *messages[turn + 1 :]]
    return len(ids) - _common(ids[::-1], _template(tokenizer, other, answer=False)[::-1])


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _dialogue(tokenizer: Any, messages: Sequence[dict[str, str]], answer: bool) -> list[int]:
    """Return the token ids of a dialogue. If `answer` is True, a chat template adds the generation prompt."""
    return _template(tokenizer, messages, answer) if tokenizer.chat_template else _plain_turns(tokenizer, messages)[0]


def _plain_turns(tokenizer: Any, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return ids and labels for a tokenizer without a chat template. An empty line ends each prompt. The
    end-of-sequence token ends each answer."""
    ids, labels = list[int](), list[int]()
    for turn, message in enumerate(messages):
        if not isinstance(message["content"], str):
            raise BadRow("images need a chat template, which the tokenizer lacks: use the model's processor")
        learned = message["role"] == "assistant"
        part = _encode(tokenizer, message["content"] + ("" if learned else "\n\n"), special=turn == 0)
        part += [tokenizer.eos_token_id] if learned and tokenizer.eos_token_id not in (None, *part[-1:]) else []
        ids += part
        labels += part if learned else [IGNORE] * len(part)
    return ids, labels
