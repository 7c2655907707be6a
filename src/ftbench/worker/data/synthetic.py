"""Generate samples of chosen lengths, without a download. The same seed gives the same samples. A model cannot learn
random tokens. A model can learn tasks if attention, positions and masks are correct."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from ftbench.errors import SpecError
from ftbench.spec.batches import synthetic_lengths
from ftbench.spec.datasets import Dataset
from ftbench.worker.data.images import CELLS, Picture, Pixels, generate
from ftbench.worker.data.tokens import IGNORE, Tokens

SYMBOLS = 24  # number of tokens for questions and answers; markers of tasks and a separator are extra


def draw(dataset: Dataset, count: int, vocab_size: int) -> list[Tokens]:
    """Return `count` samples with token ids below `vocab_size`. All tokens have labels, except for prompts of tasks."""
    lengths = synthetic_lengths(dataset, count)
    generator = np.random.default_rng(dataset.seed)
    if dataset.structure == "tasks":
        return _tasks(dataset, generator, lengths, vocab_size)
    return [Tokens(ids, list(ids), len(ids)) for ids in _random(generator, lengths, vocab_size)]


def draw_pairs(dataset: Dataset, count: int, vocab_size: int) -> list[Tokens]:
    """Return `count` preference pairs. Both sequences of a pair start with the same prompt. The prompt is half of
    the shorter sequence. In tasks, the chosen answers are correct and can be learned. Rejected answers are random."""
    drawn = draw(dataset, 2 * count, vocab_size)
    noise = _random(np.random.default_rng(dataset.seed + 1), [len(each.ids) for each in drawn[1::2]], vocab_size)
    return [_pair(chosen.ids, rejected, vocab_size) for chosen, rejected in zip(drawn[::2], noise, strict=True)]


def _pair(chosen: list[int], rejected: list[int], vocab_size: int) -> Tokens:
    prompt = min(len(chosen), len(rejected)) // 2
    rejected = chosen[:prompt] + rejected[prompt:]
    if rejected[prompt] == chosen[prompt]:  # the two answers must differ
        rejected[prompt] = (chosen[prompt] + 1) % vocab_size
    pair = [Tokens(ids, [IGNORE] * prompt + ids[prompt:], len(ids)) for ids in (chosen, rejected)]
    return replace(pair[0], rejected=pair[1])


def draw_images(dataset: Dataset, count: int, vocab_size: int, pixels: Pixels, special: set[int]) -> list[Tokens]:
    """Return `count` samples of pictures and then text. The text does not contain the token ids in `special`. All text
    tokens have labels, except for prompts of tasks. Tasks ask about the first picture. Raise SpecError if a sample
    has more than `max_length` tokens, because images cannot be truncated."""
    samples, drawn = list[Tokens](), iter(generate(dataset, count))
    pictures = [list(islice(drawn, dataset.images_per_sample)) for _ in range(count)]
    usable = [token for token in range(vocab_size) if token not in special]
    if dataset.structure == "tasks":
        texts = _picture_tasks(dataset, synthetic_lengths(dataset, count), usable, [each[0] for each in pictures])
    else:
        plain = [[usable[0] if token in special else token for token in text.ids]
                 for text in draw(dataset, count, vocab_size)]  # fmt: skip
        texts = [Tokens(ids, ids, len(ids)) for ids in plain]
    for text, each in zip(texts, pictures, strict=True):
        shown = pixels.of_sample(each)
        head = [token for length in shown.counts for token in (*[shown.token] * length, text.ids[0])]
        ids, labels = head + text.ids, [IGNORE] * len(head) + text.labels
        if len(ids) > dataset.max_length:
            raise SpecError(
                f"dataset: a sample has {len(ids):,} tokens, {sum(shown.counts):,} of them from its images, and "
                f"max_length is {dataset.max_length:,}: raise dataset.max_length or lower dataset.image_size"
            )
        samples.append(Tokens(ids, labels, len(ids), shown.pictures))
    return samples


def _roles(generator: np.random.Generator, vocabulary: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays of token ids: markers of the tasks with a separator, and symbols for questions and answers.
    The seed changes only the order of the ids."""
    if len(vocabulary) < SYMBOLS + 4:
        raise SpecError(f"dataset.structure tasks needs a vocabulary of {SYMBOLS + 4} tokens, not {len(vocabulary)}")
    tokens = generator.permutation(np.random.default_rng(0).choice(vocabulary, SYMBOLS + 4, replace=False))
    return tokens[:4], tokens[4:]


def _tasks(dataset: Dataset, generator: np.random.Generator, lengths: Sequence[int], vocab_size: int) -> list[Tokens]:
    """Return samples of three alternating tasks: copying, key-value recall and bracket matching. Correct answers
    require correct attention, positions and masks. All recall samples use the same keys with different values. A model
    that attends to another packed sample therefore answers incorrectly."""
    (*markers, separator), symbols = _roles(generator, range(vocab_size))
    makers = (_copying, _recall, _brackets)
    samples = []
    for index, length in enumerate(lengths):
        task = index % len(makers)
        question, answer = makers[task](generator, max(1, (length - 2) // 2), symbols)
        prompt = [int(markers[task]), *map(int, question), int(separator)]
        ids = (prompt + list(map(int, answer)))[: max(length, len(prompt) + 1)]
        labels = ids if dataset.loss_on == "all" else [IGNORE] * len(prompt) + ids[len(prompt) :]
        samples.append(Tokens(ids, list(labels), len(ids)))
    return samples


def _picture_tasks(
    dataset: Dataset, lengths: Sequence[int], vocabulary: Sequence[int], pictures: Sequence[Picture]
) -> list[Tokens]:
    """Return questions about pictures, with answers. A question asks for the color of a cell, the color of the next
    cell, or the number of cells with one color. The answer depends on the pixels and the positions of image tokens."""
    generator = np.random.default_rng(dataset.seed)
    markers, symbols = _roles(generator, vocabulary)
    places, kinds, samples = symbols[: CELLS**2], symbols[CELLS**2 :], []
    for index, (length, picture) in enumerate(zip(lengths, pictures, strict=True)):
        task, seen = index % 3, picture.colors
        queries = generator.integers(0, len(kinds) if task == 2 else len(places), max(1, (length - 1) // 2))
        if task == 2:
            numbers = np.bincount(seen, minlength=len(kinds))[queries]
            pairs = np.stack([kinds[queries], places[np.minimum(numbers, len(places) - 1)]], 1)
        else:
            pairs = np.stack([places[queries], kinds[seen[(queries + task) % len(places)]]], 1)
        ids = [int(markers[task]), *map(int, pairs.ravel())]
        labels = ids if dataset.loss_on == "all" else [IGNORE if at % 2 else token for at, token in enumerate(ids)]
        samples.append(Tokens(ids, [IGNORE, *labels[1:]], len(ids)))
    return samples


def _copying(generator: np.random.Generator, count: int, symbols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    question = generator.choice(symbols, count)
    return question, question


def _recall(generator: np.random.Generator, count: int, symbols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a question and its answer. The question contains keys with values, then some keys again. The answer
    contains the values of these keys."""
    pairs = min(SYMBOLS // 3, max(1, count // 3))
    keys, values = symbols[:pairs], generator.choice(symbols[SYMBOLS // 3 :], pairs)
    queries = generator.integers(0, pairs, max(1, count - pairs))
    order = generator.permutation(pairs)
    return np.concatenate([np.stack([keys[order], values[order]], 1).ravel(), keys[queries]]), values[queries]


def _brackets(generator: np.random.Generator, count: int, symbols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a question and its answer. The question opens `count` brackets and closes some of them. The answer closes
    the other brackets, the innermost first. Question and answer together have `2 * count` tokens."""
    opening, closing = symbols[: SYMBOLS // 2], symbols[SYMBOLS // 2 :]
    open_kinds: list[int] = []
    question: list[int] = []
    opened = 0
    while opened < count:
        if open_kinds and generator.random() < 0.25:
            question.append(closing[open_kinds.pop()])
        else:
            opened += 1
            open_kinds.append(int(generator.integers(len(opening))))
            question.append(opening[open_kinds[-1]])
    return np.array(question), closing[open_kinds[::-1]]


def _random(generator: np.random.Generator, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    return [generator.integers(0, vocab_size, size=length).tolist() for length in lengths]
