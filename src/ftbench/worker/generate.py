"""What the model answers to fixed prompts, before and after training: samples.json.

Answers come from the plain model: layers uncompiled, no gradient checkpointing, the loss of the libraries, attention
that takes padding. Everything is put back as it was, random numbers too, so that training goes the same way with and
without answers.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import GenerationConfig

from ftbench.spec.experiment import Experiment, Generate
from ftbench.store.rundir import RunDir, write_json
from ftbench.worker.data.tokens import template_errors, write
from ftbench.worker.methods import unsloth
from ftbench.worker.model.parts import base_model, decoder_layers
from ftbench.worker.optimizations import chunked_loss, fp8
from ftbench.worker.optimizations.fused_lora import BesideGroup

SCHEMA = 1
_NO_PADDING = ("varlen", "flex_attention")  # one takes no padded batch, the other compiles for every length


class Answers:
    """The prompts of a spec, asked once before and once after. samples.json holds `prompts`, a list of `{id, prompt,
    before, after, tokens, stop}`, with `settings` and `seconds`; `after` is null until it was asked for."""

    def __init__(self, spec: Experiment, directory: RunDir, tokenizer: Any) -> None:
        self._spec, self._directory, self._tokenizer = spec, directory, tokenizer
        self._seconds: dict[str, float] = {}
        self._rows: list[dict[str, Any]] = []

    def ask(self, model: Any, when: str) -> None:
        """Ask all prompts in one batch and write samples.json; `when` is before or after."""
        settings: Any = self._spec.measure.generate
        if not self._rows:
            self._rows = [
                prompt.model_dump() | {"before": None, "after": None, "tokens": {}, "stop": {}}
                for prompt in settings.prompts
            ]
        begun = time.monotonic()
        devices = [model.device] if model.device.type == "cuda" else []
        with plain(model, self._spec), torch.random.fork_rng(devices), torch.no_grad():  # training draws as without it
            torch.manual_seed(settings.seed)
            count, answers = answer(model, self._tokenizer, settings)
        self._seconds[when] = time.monotonic() - begun
        for row, tokens, (text, new, stop) in zip(self._rows, count, answers, strict=True):
            row["tokens"] |= {"prompt": tokens, when: new}
            row["stop"][when] = stop
            row[when] = text
        shared = {"settings": settings.model_dump(exclude={"prompts"}), "seconds": self._seconds}
        write_json(self._directory.samples, {"schema": SCHEMA, **shared, "prompts": self._rows})
        gc.collect()
        if model.device.type == "cuda":  # the pool that training starts with is the one it would have had
            torch.cuda.empty_cache()


def answer(model: Any, tokenizer: Any, settings: Generate) -> tuple[list[int], list[tuple[str, int, str]]]:
    """Return the tokens of each prompt; of each answer the text, its tokens, and what ended it: `end` (the model said
    so), `length` or `time`. Prompts are padded on the left; with the model's chat template, if it has one."""
    texts = [_written(tokenizer, prompt.prompt) for prompt in settings.prompts]
    ids = [tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"] for text in texts]
    longest, filler = max(map(len, ids)), tokenizer.pad_token_id or 0
    rows = torch.tensor([[filler] * (longest - len(row)) + row for row in ids], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=model.device)
    ends = _ends(model, tokenizer)
    generated = model.generate(input_ids=rows, attention_mask=mask, generation_config=_config(settings, ends, filler))
    answers = []
    for new in generated[:, longest:].tolist():
        stop = next((index for index, token in enumerate(new) if token in ends), None)
        kept = new if stop is None else new[:stop]
        why = "end" if stop is not None else "length" if len(new) == settings.max_new_tokens else "time"
        answers.append((tokenizer.decode(kept, skip_special_tokens=True), len(kept), why))
    return [len(row) for row in ids], answers


def _written(tokenizer: Any, prompt: str) -> str:
    if not tokenizer.chat_template:
        return prompt
    with template_errors("measure.generate"):
        return write(tokenizer, [{"role": "user", "content": prompt}], answer=True)


def _ends(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: the model's (gpt-oss has several), or the tokenizer's."""
    ids = model.generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    return [] if ids is None else list(ids) if isinstance(ids, (list, tuple)) else [ids]


def _config(settings: Generate, ends: list[int], filler: int) -> GenerationConfig:
    """Return every setting that a published model may bring, so that only the spec decides."""
    drawn = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    return GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        max_time=settings.max_seconds,
        do_sample=not settings.greedy,
        **({} if settings.greedy else drawn),
        num_beams=1,
        repetition_penalty=1.0,
        use_cache=True,
        eos_token_id=ends or None,
        pad_token_id=filler,
    )


@contextmanager
def plain(model: Any, spec: Experiment) -> Iterator[None]:
    """Make the model ready to answer, for the length of a block."""
    with ExitStack() as undo:
        if spec.method.name == "unsloth":
            unsloth.answering(model, spec, undo)
        else:
            _without_training(model, undo)
        _without_compiled_layers(model, undo)
        _with_its_own_forward(model, undo)
        _with_plain_products(model, undo)
        _with_attention_for_padding(model, undo)
        yield


def _without_training(model: Any, undo: ExitStack) -> None:
    """Make every module ready to answer. Not so bitsandbytes' 4-bit layers, which have nothing to switch off: on a CPU
    they would pack their weights for it, and train with others afterwards."""
    for module in model.modules():
        undo.callback(setattr, module, "training", module.training)
    model.eval()
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.training = True


def _without_compiled_layers(model: Any, undo: ExitStack) -> None:
    for layer in decoder_layers(model):
        compiled, layer._compiled_call_impl = layer._compiled_call_impl, None
        undo.callback(setattr, layer, "_compiled_call_impl", compiled)


def _with_its_own_forward(model: Any, undo: ExitStack) -> None:
    """Leave out the loss over chunks, whose forward pass hides what the model's takes."""
    base = base_model(model)
    if chunked_loss.is_on(base):
        undo.callback(setattr, base, "forward", base.__dict__.pop("forward"))


def _with_plain_products(model: Any, undo: ExitStack) -> None:
    """Use plain products: those in 8 bits want many rows, and an answer grows by one."""
    for module in model.modules():
        if fp8.multiplies_in_8_bits(module):
            module.forward = module.forward_in_16_bits
            undo.callback(module.__dict__.pop, "forward")
        if isinstance(module, BesideGroup):
            undo.callback(setattr, module, "joined", module.joined)
            module.joined = (None,)


def _with_attention_for_padding(model: Any, undo: ExitStack) -> None:
    base = base_model(model)
    used = base.config.get_text_config()._attn_implementation
    if used in _NO_PADDING:
        base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
        undo.callback(base.set_attn_implementation, used)
