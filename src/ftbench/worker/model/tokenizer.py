"""A tokenizer for models with random weights: trained on the shipped sample in a second, nothing downloaded."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<bos>", "<eos>", "<turn>")
MAX_VOCABULARY = 16_384
CHAT_TEMPLATE = (
    "{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save the tokenizer beside a model of `vocab_size` in `folder`."""
    build_tokenizer(vocab_size).save_pretrained(folder)


def build_tokenizer(vocab_size: int) -> Any:
    """Train a byte-level BPE on the sample data set. The same text gives the same tokenizer; ids stay below
    `vocab_size`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, MAX_VOCABULARY),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


def _texts() -> list[str]:
    lines = (files("ftbench.facts") / "sample.jsonl").read_text("utf-8").splitlines()
    return [text for line in lines for text in json.loads(line).values() if text]
