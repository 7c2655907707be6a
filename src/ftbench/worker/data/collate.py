"""Build batches from tokenized rows, and count their tokens. Rows are padded on the right or concatenated."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from ftbench.errors import NotAppliedError
from ftbench.families.vision import NOTHING
from ftbench.spec.experiment import Experiment
from ftbench.worker import parallel
from ftbench.worker.data.images import Picture, Pixels
from ftbench.worker.data.tokens import IGNORE, Row
from ftbench.worker.measure.batch_count import COUNT, count_of

NO_TOKENS = (np.empty(0, dtype=np.int64),) * 2
BY_BOUNDARIES = ("varlen", "flash_attention_2", "flash_attention_3")  # attention kernels that take sequence boundaries
# Ring attention in float32 cuts rows into parts of a multiple of 32 tokens, because torch's kernel pads to 32 tokens.
ROWS_IN_32_BITS = 32
_COLUMNS = {"input_ids": "input_ids", "labels": "labels", "seq_lengths": "lengths"}  # trl's and ftbench's names


class Collator:
    """Builds batches for the optimizations of the spec, and counts the tokens of each batch."""

    def __init__(
        self, spec: Experiment, pad_token_id: int, longest: int, most: int | None, pixels: Pixels | None = None,
        pictures: Sequence[Picture] = (), labels: int = 0, sample: int = 0,
    ) -> None:  # fmt: skip
        """Create a collator.

        Args:
            spec: The spec of the run.
            pad_token_id: Id of the padding token.
            longest: Number of tokens in the longest row. `fixed_shape` pads every row to this length.
            most: Largest number of samples in a batch, including filler samples. None if every row has one sample.
            pixels: The image processor. None for text.
            pictures: All images of the data set. The column `shown` of a row contains indexes into this list.
            labels: Minimum length of `label_positions`. If a batch has fewer labels, other positions are added.
            sample: Number of tokens in the longest sample (default: the larger of `longest` and dataset.max_length).
                Attention kernels start work for this many tokens in each sample of a row.
        """
        on = spec.optimizations
        self._flat = on.packing or on.padding_free
        self._parts = spec.launch.parts_of_sequence
        if self._parts > 1 and spec.train.precision == "fp32":
            self._parts *= ROWS_IN_32_BITS
        self._fixed = self._even(longest) if on.fixed_shape else None
        self._micro = spec.launch.micro_batches or 1
        self._rows = spec.train.batch_size // (self._micro if self._flat else 1)
        self._pixels, self._pictures = pixels, pictures
        self._tiles = max((pixels.size(each).tiles for each in pictures), default=0) if pixels and self._fixed else 0
        self._positions, self._labels = on.chunked_loss, labels
        self._boundaries = on.attention in BY_BOUNDARIES
        self._sample = sample or max(longest, spec.dataset.max_length)
        self._most = most
        self._pad = pad_token_id

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        samples = [sample for row in rows for sample in samples_of(row)]
        if self._flat and self._micro > 1:
            batch = self._rows_of_samples(rows)
        else:
            batch = self._concatenated(samples) if self._flat else self._padded(samples)
        pictures = [self._pictures[index] for row in rows for index in row.get("shown", ())]
        if pictures and self._pixels:
            batch |= self._pixels.batch(pictures, batch, self._tiles)
        labels = int((batch["labels"][:, 1:] != IGNORE).sum())
        count = count_of([ids for ids, _ in samples], batch["input_ids"].size, labels)
        count.images = len(pictures)
        count.of_images = sum(map(self._pixels.size, pictures), NOTHING) if self._pixels else None
        count.tokens += [picture.key.encode() for picture in pictures]
        if self._positions:
            batch["labels"][:, 0] = IGNORE  # the model does not predict the first token
            labeled = batch["labels"].reshape(-1) != IGNORE
            missing = max(0, self._labels - int(labeled.sum()))
            others = np.flatnonzero(~labeled)[:missing]
            batch["label_positions"] = np.concatenate([np.flatnonzero(labeled), others])
        tensors = {
            key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in batch.items()
        }
        return tensors | {COUNT: count}

    def _padded(self, samples: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
        longest = self._even(max((len(ids) for ids, _ in samples), default=1))
        shape = (self._rows if self._fixed or self._micro > 1 else max(1, len(samples)), self._fixed or longest)
        input_ids = np.full(shape, self._pad, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORE, dtype=np.int64)
        for row, (ids, labels) in enumerate(samples):
            input_ids[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
            targets[row, : len(ids)] = labels
        mask[len(samples) :, 0] = 1  # filler rows, because a fully masked row would give NaN
        return {"input_ids": input_ids, "attention_mask": mask, "labels": targets}

    def _even(self, length: int) -> int:
        """Return `length` in tokens, rounded up to a multiple of the number of GPUs that share each row."""
        return -(-length // self._parts) * self._parts

    def _rows_of_samples(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a batch with one row of concatenated samples for each pipeline micro-batch. Pad the shorter rows."""
        starts = range(0, self._micro * self._rows, self._rows)
        groups = [[sample for row in rows[at : at + self._rows] for sample in samples_of(row)] for at in starts]
        lengths = [sum(len(ids) for ids, _ in group) for group in groups]
        full = zip(groups, lengths, strict=True)
        batches = [self._concatenated([*group, *self._filler(max(2, *lengths) - length)]) for group, length in full]
        return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}

    def _concatenated(self, samples: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
        """Return a batch with one row that contains all samples.

        Positions restart at 0 in each sample, and attention uses positions to find the sample boundaries. The first
        token of a sample has no label. With a fixed shape, padding-only samples fill the row. If all rows of the data
        set have one sample, each sample is padded to one length instead. Batched attention is then faster.
        """
        if self._fixed and self._most is None:
            samples = [self._filled(sample, self._fixed) for sample in samples]
            samples += [self._filled(NO_TOKENS, self._fixed)] * (self._rows - len(samples))
        elif self._fixed:
            samples = [*samples, *self._filler(self._fixed * self._rows - sum(len(ids) for ids, _ in samples))]
        samples = samples or self._filler(2)  # with several ranks, the last batch can be empty
        lengths = [len(ids) for ids, _ in samples]
        targets = np.concatenate([labels for _, labels in samples])
        starts = np.cumsum([0, *lengths])
        targets[starts[:-1]] = IGNORE
        batch: dict[str, Any] = {
            "input_ids": np.concatenate([ids for ids, _ in samples])[None],
            "labels": targets[None],
            "position_ids": np.concatenate([np.arange(length) for length in lengths])[None],
        }
        if self._boundaries:
            # With a fixed shape, empty samples at the end keep the number of boundaries constant.
            missing = self._most + 1 - len(starts) if self._fixed and self._most else 0
            bounds = np.concatenate([starts, np.full(max(missing, 0), starts[-1])]).astype(np.int32)
            # The same value for all batches, because torch.compile would recompile for a new value.
            longest = self._fixed if self._fixed and self._most is None else max(self._sample, *lengths)
            batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        return batch

    def _filled(self, sample: tuple[np.ndarray, np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and labels of a sample, padded to `length` tokens."""
        ids, labels = (np.pad(part, (0, length - len(part)), constant_values=fill)
                       for part, fill in zip(sample, (self._pad, IGNORE), strict=True))  # fmt: skip
        return ids, labels

    def _filler(self, length: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return filler samples with `length` padding tokens in total, and at most `sample` tokens each."""
        ids = np.full(length, self._pad, dtype=np.int64)
        cuts = range(self._sample, length, self._sample)
        return [(part, np.full_like(part, IGNORE)) for part in np.split(ids, cuts) if len(part)]


def counting(collate: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Sequence[dict[str, Any]]], dict[str, Any]]:
    """Wrap a library's `collate` function. The wrapper accepts ftbench's rows, and adds token counts to each batch.

    Raises:
        NotAppliedError: A batch does not contain the tokens and labels of its samples.
    """

    def call(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        batch = dict(collate([{key: row[name] for key, name in _COLUMNS.items()} for row in rows]))
        samples = [sample for row in rows for sample in samples_of(row)]
        ids, labels = batch["input_ids"].numpy(), batch["labels"].numpy()
        kept = batch["attention_mask"].numpy().astype(bool) if "attention_mask" in batch else np.ones_like(ids, bool)
        starts = np.cumsum([0, *(len(each) for each, _ in samples)])[:-1]
        actual, expected = labels[kept].copy(), np.concatenate([each for _, each in samples])
        actual[starts] = expected[starts] = IGNORE  # the model does not predict the first token
        if not np.array_equal(ids[kept], np.concatenate([each for each, _ in samples])):
            raise NotAppliedError("the collator of the library changed the tokens of a batch")
        if not np.array_equal(actual, expected):
            raise NotAppliedError("the collator of the library changed which tokens contribute to the loss")
        return batch | {COUNT: count_of([each for each, _ in samples], ids.size, int((labels[:, 1:] != IGNORE).sum()))}

    return call


def verify(spec: Experiment, batches: Iterable[tuple[tuple[int, ...], bool]]) -> list[str]:
    """Return a message for each batch optimization that was not applied. Each element of `batches` is a pair: the shape
    of a batch, and True if the batch has padding."""
    problems, on = [], spec.optimizations
    unpadded = (on.packing or on.padding_free) and not (on.fixed_shape or spec.launch.pp)
    if unpadded and any(padded for _, padded in batches):
        problems.append(f"optimizations.{'packing' if on.packing else 'padding_free'} is on and batches have padding")
    if on.fixed_shape and len(shapes := {shape for shape, _ in batches}) > 1:
        problems.append(f"optimizations.fixed_shape is on and batches have shapes {sorted(shapes)}")
    return problems


def samples_of(row: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return a pair of arrays for each sample in a row: the token ids and the labels."""
    ids = np.asarray(row["input_ids"], dtype=np.int64)
    labels = np.asarray(row["labels"], dtype=np.int64)
    if not len(row["lengths"]):
        return []
    cuts = np.cumsum(row["lengths"])[:-1]
    return list(zip(np.split(ids, cuts), np.split(labels, cuts), strict=True))


def filled(rows: Sequence[Row], size: int) -> list[Row]:
    """Return the rows, with empty rows up to a multiple of `size`. All ranks then get the same number of batches."""
    return [*rows, *([] for _ in range(-len(rows) % size))]


def token_hash(rows: Sequence[Row], spec: Experiment, count: int, dealt: slice = slice(None)) -> str:
    """Return the SHA-256 of the tokens and images in the first `count` batches. The slice `dealt` selects the batches
    of one rank. After the last batch, continue with the first batch."""
    size = spec.train.batch_size
    full = filled(rows, size * spec.launch.data_parallel_size)
    batches = [full[at : at + size] for at in range(0, len(full), size)]
    digest = hashlib.sha256()
    for batch in islice(cycle(batches[dealt]), count):
        samples = [sample for row in batch for sample in row]
        for sample in samples:
            digest.update(np.asarray(sample.ids, dtype=np.int64).tobytes())
        for picture in (picture for sample in samples for picture in sample.pictures):
            digest.update(picture.key.encode())
    return digest.hexdigest()


def verify_order(rows: Sequence[Row], spec: Experiment, count: int, order_hash: str, rank: int) -> list[str]:
    """Return a message if `order_hash` differs from the hash of the `count` batches that `rank` should train on."""
    shares = spec.launch.data_parallel_size
    share = parallel.share_of(spec.launch, rank)
    if order_hash == token_hash(rows, spec, count, slice(share, None, shares)):
        return []
    if spec.launch.gpus == 1:
        return ["the run did not train on its samples in the expected order"]
    return [f"rank {rank} did not train on share {share + 1} of {shares} of the samples, in the expected order"]
