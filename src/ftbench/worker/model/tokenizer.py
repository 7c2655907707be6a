"""Create a tokenizer for models with random weights. Training on ftbench's sample data set takes a second."""

import json
from functools import cache
from typing import Any

from ftbench.facts import SAMPLE

SPECIAL = ("<pad>", "<bos>", "<eos>", "<turn>")
MAX_VOCABULARY = 16_384
CHAT_TEMPLATE = (
    "{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)

IMAGE = "<image>"
_PARTS = (  # the content of a message: a text, or a list of images and texts
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE + "\n{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)


def build_tokenizer(vocab_size: int, reads_images: bool = False) -> Any:
    """Train a byte-level BPE tokenizer on the sample data set, with ids below `vocab_size`. The result is
    deterministic. With `reads_images`, the tokenizer has an image token."""
    from transformers import PreTrainedTokenizerFast

    template = CHAT_TEMPLATE.replace("{{ message['content'] }}", _PARTS) if reads_images else CHAT_TEMPLATE
    special = (*SPECIAL, *([IMAGE] if reads_images else []))
    return PreTrainedTokenizerFast(
        tokenizer_object=_trained(min(vocab_size, MAX_VOCABULARY), special), pad_token="<pad>", bos_token="<bos>",
        eos_token="<eos>", chat_template=template,
    )  # fmt: skip


@cache
def _trained(vocab_size: int, special: tuple[str, ...]) -> Any:
    """Return a BPE tokenizer of the `tokenizers` package, trained on the sample data set."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = SAMPLE.read_text("utf-8").splitlines()
    tokenizer.train_from_iterator((text for line in lines for text in json.loads(line).values() if text), trainer)
    return tokenizer
