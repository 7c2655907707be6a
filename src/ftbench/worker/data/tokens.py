"""Examples → token ids with labels, through the tokenizer's own chat template."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np

from ftbench.core.data_formats import BadRow, Example
from ftbench.core.units import some
from ftbench.errors import DataError, FtbenchError
from ftbench.worker.data.pictures import Picture

IGNORE = -100
FEW = 8  # answers whose ends are looked for one by one


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of one sample and which of them carry loss (`labels` is the id, or -100). `full_length` is the number of
    tokens before the sample was cut to `max_length`, `pictures` what its tokens for images stand for. Of a pair it is
    the chosen sequence, with the `rejected` one; of a prompt the `row` that it is of."""

    ids: list[int]
    labels: list[int]
    full_length: int
    pictures: tuple[Picture, ...] = ()
    rejected: Tokens | None = None
    row: Mapping[str, Any] | None = None

    @property
    def sequences(self) -> list[Tokens]:
        """What the model is given of the sample: itself, or both of a pair."""
        return [self] if self.rejected is None else [self, self.rejected]

    @property
    def longest(self) -> int:
        return max(len(each.ids) for each in self.sequences)

    @property
    def learns(self) -> bool:
        """Whether some token carries loss in each of its sequences, and these differ."""
        alike = self.rejected is not None and self.ids == self.rejected.ids
        return not alike and all(any(label != IGNORE for label in each.labels[1:]) for each in self.sequences)


@dataclass(frozen=True, slots=True)
class ShownImages:
    """Pictures of a sample, how many tokens each becomes, and the token that stands for one."""

    token: int
    pictures: tuple[Picture, ...]
    counts: tuple[int, ...]


def tokenise(
    tokenizer: Any, example: Example, max_length: int, loss_on: str, images: ShownImages | None = None
) -> Tokens:
    """Return the tokens of an example; plain text, and everything with `loss_on` all, carries loss throughout, but for
    the tokens of images. Raises BadRow where the text has more or fewer markers of images than there are."""
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
    if images:
        ids, labels = _repeated(ids, labels, images)
    return Tokens(ids[:max_length], labels[:max_length], len(ids), images.pictures if images else ())


def tokenise_pair(tokenizer: Any, example: Example, max_length: int) -> Tokens:
    """Return the chosen sequence with the rejected one. Loss begins where either stops being the prompt, opened for an
    answer, as in trl's DPOTrainer."""
    ids_of = _template if tokenizer.chat_template else _plain_ids
    prompt, sides = ids_of(tokenizer, example.messages[:-1], True), (example.messages, example.rejected)
    written = [ids_of(tokenizer, messages, False) for messages in sides]
    begin = min(_common(prompt, ids) for ids in written)
    labels = [[IGNORE] * begin + ids[begin:] for ids in written]
    chosen, rejected = (
        Tokens(ids[:max_length], own[:max_length], len(ids)) for ids, own in zip(written, labels, strict=True)
    )
    return replace(chosen, rejected=rejected)


def tokenise_prompt(tokenizer: Any, example: Example) -> Tokens:
    """Return what comes before the last answer, opened for one, without labels. Raises BadRow for plain text."""
    if not example.question:
        raise BadRow("it holds no prompt to answer: set dataset.format=prompt and dataset.columns={prompt: COLUMN}")
    ids = (_template if tokenizer.chat_template else _plain_ids)(tokenizer, example.question, True)
    return Tokens(ids, [IGNORE] * len(ids), len(ids))


def _plain_ids(tokenizer: Any, messages: Sequence[dict[str, str]], answer: bool) -> list[int]:
    return _plain_turns(tokenizer, messages)[0]


def _repeated(ids: list[int], labels: list[int], images: ShownImages) -> tuple[list[int], list[int]]:
    """Return ids and labels in which each token of an image stands as often as the image has tokens, without loss."""
    places = np.flatnonzero(np.array(ids) == images.token)
    if len(places) != len(images.counts):
        raise BadRow(
            f"its text has {some(len(places), 'marker')} of images, and the row has {some(len(images.counts), 'image')}"
        )
    unseen, times = np.array(labels), np.ones(len(ids), dtype=int)
    unseen[places], times[places] = IGNORE, images.counts
    return np.repeat(ids, times).tolist(), np.repeat(unseen, times).tolist()


def _encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return ids and labels: an assistant turn carries loss from where the template opens an answer to its last token.

    An answer begins where the dialogue before it, opened for an answer, stops being its beginning; it ends before the
    part that stays when the answer is replaced, plus the tokens that close the last answer if they follow here too.
    Templates write a turn differently once another follows, so no shorter dialogue can be trusted to be a prefix.
    """
    ids = _template(tokenizer, messages, answer=False)
    labels = [IGNORE] * len(ids)
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    until = messages[: answers[-1] + 1]
    ended = ids if len(until) == len(messages) else _template(tokenizer, until, answer=False)
    closing = ended[_end_of_content(tokenizer, until, answers[-1], ended) :]
    spans = _marked_spans(tokenizer, messages, answers, ids) if len(answers) > FEW else None
    for begin, end in spans or _compared_spans(tokenizer, messages, answers, ids):
        closed = end + _common(ids[end:], closing)
        labels[begin:closed] = ids[begin:closed]
    return ids, labels


def _compared_spans(
    tokenizer: Any, messages: Sequence[dict[str, str]], answers: Sequence[int], ids: list[int]
) -> Iterator[tuple[int, int]]:
    """Yield where each answer begins and where its text ends, two dialogues an answer."""
    for turn in answers:
        begin = _common(ids, _template(tokenizer, messages[:turn], answer=True)) if turn else 0
        yield begin, len(ids) if turn == len(messages) - 1 else _end_of_content(tokenizer, messages, turn, ids)


def _marked_spans(
    tokenizer: Any, messages: Sequence[dict[str, str]], answers: Sequence[int], ids: list[int]
) -> list[tuple[int, int]] | None:
    """Return the same from a few dialogues, whatever their length: one in which every turn ends with a mark, and those
    before the first, the middle and the last answer, which are all to open an answer alike. None where they do not, or
    where the template does more to a text than write it."""
    text = write(tokenizer, messages)
    written = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=tokenizer.is_fast)
    ends = _marked_ends(tokenizer, messages, text)
    if ends is None or written.get("offset_mapping") is None or written["input_ids"] != ids:
        return None
    openings = dict[str, str]()
    for role in {messages[turn - 1]["role"] for turn in answers if turn}:
        after = [turn for turn in answers if turn and messages[turn - 1]["role"] == role]
        prompts = {
            turn: write(tokenizer, messages[:turn], True) for turn in (after[0], after[len(after) // 2], after[-1])
        }
        opened = {prompt[ends[turn - 1] :] for turn, prompt in prompts.items()}
        if len(opened) > 1 or not all(text.startswith(prompt[: ends[turn - 1]]) for turn, prompt in prompts.items()):
            return None
        (openings[role],) = opened
    first, last = np.array(written["offset_mapping"]).reshape(-1, 2).T
    spans = []
    for turn in answers:
        opening = openings[messages[turn - 1]["role"]] if turn else ""
        before = ends[turn - 1] if turn else 0
        begin = before + _common(text[before : before + len(opening)], opening)
        end = len(text) if turn == len(messages) - 1 else ends[turn]
        spans.append((int(np.searchsorted(last, begin, "right")), int(np.searchsorted(first, end))))
    return spans


def write(tokenizer: Any, messages: Sequence[dict[str, Any]], answer: bool = False) -> str:
    """Return a dialogue as text, rendered by the chat template; with `answer`, end it with the prompt for an answer."""
    return str(
        tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answer, strftime_now=_fixed_date
        )
    )


@contextmanager
def template_errors(where: str) -> Iterator[None]:
    """Turn any exception in the block into a DataError that starts with `where`. A chat template is a program and may
    raise anything."""
    try:
        yield
    except BadRow as error:
        raise DataError(f"{where}: {error}") from None
    except (MemoryError, FtbenchError):
        raise
    except Exception as error:  # noqa: BLE001
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise DataError(f"{where}: the tokenizer or its chat template refuses it ({reason})") from None


def _marked_ends(tokenizer: Any, messages: Sequence[dict[str, str]], text: str) -> list[int] | None:
    """Return where in the text of a dialogue each turn's own text ends; None where marks at their ends are not found
    there, each once and with nothing else changed."""
    mark = next(word for i in itertools.count() if (word := f"qx{i}x") not in text)
    for strip in (False, True):  # some templates write a text without the space at its end
        contents = [str(message["content"]) for message in messages]
        marked = [
            message | {"content": f"{content.rstrip() if strip else content}{mark}{turn}q"}
            for turn, (message, content) in enumerate(zip(messages, contents, strict=True))
        ]
        pieces = re.split(f"{mark}([0-9]+)q", write(tokenizer, marked))
        if "".join(pieces[::2]) == text and pieces[1::2] == [str(turn) for turn in range(len(messages))]:
            return list(itertools.accumulate(map(len, pieces[:-1:2])))
    return None


def _end_of_content(tokenizer: Any, messages: Sequence[dict[str, str]], turn: int, ids: list[int]) -> int:
    """Return where the text of a turn ends: what comes after it stays the same with a text that ends otherwise."""
    content = messages[turn]["content"]
    mark = "!" if content.rstrip().endswith("?") else "?"
    other = [*messages[:turn], messages[turn] | {"content": f"{content} {mark}"}, *messages[turn + 1 :]]
    return len(ids) - _common(ids[::-1], _template(tokenizer, other, answer=False)[::-1])


def _template(tokenizer: Any, messages: Sequence[dict[str, str]], answer: bool) -> list[int]:
    return _encode(tokenizer, write(tokenizer, messages, answer), special=False)


def _fixed_date(pattern: str) -> str:
    """Return a fixed date for templates that write today's: runs of two days would train on different tokens
    otherwise."""
    return date(2025, 1, 1).strftime(pattern)


def _common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _plain_turns(tokenizer: Any, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Return the turns for a tokenizer without a chat template (a base model): separated by an empty line, answers
    ended."""
    ids: list[int] = []
    labels: list[int] = []
    for turn, message in enumerate(messages):
        if not isinstance(message["content"], str):
            raise BadRow("the tokenizer has no chat template, which images need: give the model's processor")
        learned = message["role"] == "assistant"
        part = _encode(tokenizer, message["content"] + ("" if learned else "\n\n"), special=turn == 0)
        if learned and tokenizer.eos_token_id is not None:
            part.append(tokenizer.eos_token_id)
        ids += part
        labels += part if learned else [IGNORE] * len(part)
    return ids, labels
