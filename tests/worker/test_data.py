"""Rows become the expected tokens, and the statistics describe them."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import groupby

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from conftest import spec_of
from ftbench.core.data_formats import BadRow, detect, example
from ftbench.errors import DataError, SpecError
from ftbench.spec.batches import synthetic_lengths
from ftbench.spec.datasets import Dataset
from ftbench.spec.identity import fingerprint
from ftbench.worker.data import prepare as preparing
from ftbench.worker.data import sources, synthetic
from ftbench.worker.data.images import Picture
from ftbench.worker.data.sources import open_rows
from ftbench.worker.data.tokens import IGNORE, Tokens, tokenise
from ftbench.worker.model.tokenizer import CHAT_TEMPLATE, build_tokenizer


def prepare(dataset: Dataset, tokenizer: object, vocabulary: int, batch_size: int) -> preparing.Prepared:
    spec = spec_of(train={"batch_size": batch_size}).model_copy(update={"dataset": dataset})
    return preparing.prepare(spec, tokenizer, vocabulary)


def flat(rows: list) -> list:
    """Return the samples of all rows."""
    return [sample for row in rows for sample in row]


def answers_of(tokenizer, samples):
    return [tokenizer.decode([t for t in s.labels if t != IGNORE]).removesuffix("<eos>\n") for s in samples]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(8192).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def data_file(tmp_path):
    def write(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
        return Dataset(name="file", path=str(path), max_length=128)

    return write


PAIR = {"instruction": "Name a colour.", "input": "", "output": "Blue."}


@pytest.mark.parametrize(
    ("columns", "format_name"),
    [
        (["instruction", "input", "output"], "alpaca"),
        (["messages", "id"], "messages"),
        (["conversations"], "messages"),
        (["prompt", "completion"], "prompt-completion"),
        (["text", "title"], "text"),
    ],
)
def test_format_is_detected_from_columns(columns, format_name):
    assert detect(columns, "file") == format_name


def test_unknown_columns_are_an_error_with_supported_formats():
    with pytest.raises(DataError, match=r"columns a, b match no format \(alpaca: instruction, output"):
        detect(["b", "a"], "file")


def test_only_the_answer_has_loss(tokenizer):
    tokens = tokenise(tokenizer, example(PAIR, "alpaca"), 128, "completion")
    learned = [label for label in tokens.labels if label != IGNORE]
    assert tokenizer.decode(learned) == "Blue.<eos>\n"
    assert tokenizer.decode(tokens.ids) == "<turn>user\nName a colour.<eos>\n<turn>assistant\nBlue.<eos>\n"


def test_only_answers_of_a_dialogue_have_loss(tokenizer):
    turns = [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello."),
        ("user", "Bye"),
        ("assistant", "See you."),
    ]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    tokens = tokenise(tokenizer, example(row, "messages"), 128, "completion")
    learned = tokenizer.decode([label for label in tokens.labels if label != IGNORE])
    assert learned == "Hello.<eos>\nSee you.<eos>\n"


# As in Qwen3: only the last answer starts with an empty thought.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHT = "<think>\n\n</think>\n\n"
CLOSED = "<|im_end|>\n"


@pytest.fixture(scope="module")
def thinking():
    """A tokenizer whose template renders an answer differently if another turn follows."""
    made = build_tokenizer(8192)
    made.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    made.chat_template = THINKING
    return made


def learned_parts(tokenizer, *contents):
    """Return the parts with loss as text. The contents alternate between user and assistant."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    tokens = tokenise(tokenizer, example({"messages": turns}, "messages"), 512, "completion")
    assert all(label in (token, IGNORE) for token, label in zip(tokens.ids, tokens.labels, strict=True))
    parts = groupby(tokens.labels, lambda label: label != IGNORE)
    return [tokenizer.decode(list(labels)) for learned, labels in parts if learned]


@pytest.mark.parametrize(
    "answers",
    [
        ("Hello.",),
        ("Same.", "Same.", "Same."),
        ("Hello!\n\n", "  See\nyou"),
        ("Who?", "What ?", "Why ? ?", "How??"),
        ("user", "assistant", "<think>"),
    ],
    ids=str,
)
def test_answers_have_loss_with_a_thinking_template(thinking, answers):
    contents = [content for n, answer in enumerate(answers) for content in (f"Question {n} ?", answer)]
    wanted = [*(answer + CLOSED for answer in answers[:-1]), THOUGHT + answers[-1] + CLOSED]
    assert learned_parts(thinking, *contents) == wanted


def test_dialogue_that_ends_with_a_question_has_loss_on_answers(thinking):
    assert learned_parts(thinking, "Hi", "Hello.", "And", "Yes.", "Bye") == ["Hello." + CLOSED, "Yes." + CLOSED]


@pytest.mark.parametrize("template", [THINKING, THINKING.replace("message.content", "message.content | trim")])
def test_every_answer_of_a_long_dialogue_has_loss(thinking, monkeypatch, template):
    monkeypatch.setattr(thinking, "chat_template", template)
    parts = learned_parts(thinking, *(f"words and words {n}." for n in range(40)))
    assert parts[:-1] == [f"words and words {n}.{CLOSED}" for n in range(1, 39, 2)]
    assert parts[-1] == f"{THOUGHT}words and words 39.{CLOSED}"


def test_answers_have_loss_with_the_shipped_template(tokenizer):
    assert learned_parts(tokenizer, "Hi ?", "Same.", "Bye ?", "Same.") == ["Same.<eos>\n", "Same.<eos>\n"]


def test_template_with_a_date_gives_the_same_tokens_every_day(tokenizer, data_file, monkeypatch):
    dated = "<turn>system\nToday is {{ strftime_now('%d %B %Y') }}.<eos>\n" + CHAT_TEMPLATE
    monkeypatch.setattr(tokenizer, "chat_template", dated)
    dataset = data_file([PAIR, PAIR | {"output": "Red."}])
    plain, found = [], []
    for day in (datetime(2024, 2, 29), datetime(2031, 12, 5)):

        class Clock(datetime):
            @classmethod
            def now(cls, tz=None, day=day):
                return day

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        plain.append(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False))
        found.append(prepare(dataset, tokenizer, 8192, 2))
    assert ["29 February 2024" in plain[0], "05 December 2031" in plain[1]] == [True, True]  # the clock was patched
    assert found[0] == found[1]
    assert "<turn>system\nToday is " in tokenizer.decode(found[0].train[0][0].ids)


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content", "thinking", "tools"])
def test_text_that_only_a_chat_template_writes_is_an_error(key):
    """trl passes these to the chat template. Without an error, they would be missing in the tokens."""
    user, answer = {"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "I look."}
    whole = example({"messages": [user, answer | {"tool_calls": None}], "tools": []}, "messages")
    assert whole == example({"messages": [user, answer]}, "messages")
    row = {"tools": [{"name": "f"}]} if key == "tools" else {}
    with pytest.raises(BadRow, match=f"`{key}`.* not supported"):
        example(row | {"messages": [user, answer | {key: [{"name": "f"}]}]}, "messages")


@pytest.mark.parametrize(
    ("columns", "format_name"),
    [(["prompt", "completion"], "prompt-completion"), (["prompt", "chosen", "rejected"], "preference")],
)
def test_tools_are_an_error_with_answers_and_pairs_too(columns, format_name):
    """trl gives the column to the chat template in both."""
    row = {name: [{"role": "assistant", "content": name}] for name in columns}
    row |= {"prompt": [{"role": "user", "content": "Rome?"}], "tools": [{"name": "f"}]}
    with pytest.raises(BadRow, match="`tools` is not supported"):
        example(row, format_name)


def test_sharegpt_turns_give_the_same_dialogue(tokenizer):
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    shared = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
    assert example(chat, "messages") == example(shared, "messages")


def test_loss_on_all_labels_every_token(tokenizer):
    tokens = tokenise(tokenizer, example(PAIR, "alpaca"), 128, "all")
    assert tokens.labels == tokens.ids


def test_plain_text_ends_with_eos_and_has_loss_on_all_tokens(tokenizer):
    tokens = tokenise(tokenizer, example({"text": "once"}, "text"), 128, "completion")
    assert tokens.ids[-1] == tokenizer.eos_token_id
    assert tokens.labels == tokens.ids


def test_text_that_ends_with_eos_gets_no_second_one(tokenizer, monkeypatch):
    """As in trl's SFTTrainer."""
    tokens = tokenise(tokenizer, example({"text": "once<eos>"}, "text"), 128, "completion")
    assert tokenizer.decode(tokens.ids) == "once<eos>"
    monkeypatch.setattr(tokenizer, "chat_template", None)
    tokens = tokenise(tokenizer, example(PAIR | {"output": "Blue.<eos>"}, "alpaca"), 128, "completion")
    assert tokens.ids.count(tokenizer.eos_token_id) == 1


def test_wikipedia_title_uses_the_text_after_the_first_sentence():
    row = {"title": "富士山", "text": "富士山は日本の山である。標高は3776メートル。静岡県と山梨県にまたがる。"}
    (question, answer) = example(row, "wikipedia-title").messages
    assert question["content"] == "標高は3776メートル。静岡県と山梨県にまたがる。"
    assert answer["content"] == "富士山"
    with pytest.raises(BadRow, match="one sentence"):
        example({"title": "x", "text": "一文だけ。"}, "wikipedia-title")


def test_statistics_describe_the_tokens(tokenizer, data_file):
    rows = [PAIR | {"output": "word " * n} for n in (1, 40, 80, 300)]
    found = prepare(data_file(rows), tokenizer, 8192, 2).description
    assert found["samples"] == 4
    assert found["truncated"] == 1
    assert found["tokens"]["max"] == 128
    assert found["tokens_before_truncation"]["max"] > 300
    assert sum(found["tokens"]["histogram"]["counts"]) == 4


def test_fingerprint_of_the_data_depends_on_tokens_labels_pictures_and_order():
    made = [Tokens([1, 2], labels, 2, pictures) for labels in ([1, 2], [IGNORE, 2])
            for pictures in ((), (Picture(4, 4, 0, "a"),), (Picture(4, 4, 0, "b"),))]  # fmt: skip
    assert len({preparing._hash(samples) for samples in ([], made, made[::-1], *([each] for each in made))}) == 9


def test_order_of_length_grouping_depends_on_the_seed():
    made = [Tokens([1] * length, [1] * length, length) for length in range(2, 40)]
    specs = [spec_of(dataset={"seed": seed}, optimizations={"length_grouping": True}) for seed in (1, 1, 2)]
    orders = [[each.full_length for each in preparing._ordered(spec, made)] for spec in specs]
    assert orders[0] == orders[1] != orders[2]


def test_samples_are_drawn_like_datasets_shuffle(tokenizer, data_file):
    import datasets

    rows = [PAIR | {"output": f"answer {i}"} for i in range(30)]
    chosen = data_file(rows).model_copy(update={"samples": 5})
    found = prepare(chosen, tokenizer, 8192, 2)
    wanted = datasets.Dataset.from_list(rows).shuffle(seed=42).select(range(5))
    assert answers_of(tokenizer, flat(found.train)) == wanted["output"]


def test_evaluation_samples_are_not_trained_on(tokenizer, data_file):
    rows = [PAIR | {"output": f"answer {i}"} for i in range(10)]
    found = prepare(data_file(rows).model_copy(update={"eval_samples": 3}), tokenizer, 8192, 2)
    assert len(found.train) == 7
    assert not {tuple(s.ids) for s in flat(found.train)} & {tuple(s.ids) for s in flat(found.evaluation)}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"samples": 5}, r"too few for 5 samples; lower dataset\.samples"),
        ({"eval_samples": 2}, r"too few for 1 sample and 2 to .* dataset\.eval_samples"),
    ],
)
def test_too_few_rows_are_an_error(tokenizer, data_file, sizes, message):
    with pytest.raises(SpecError, match=message):
        prepare(data_file([PAIR] * 2).model_copy(update=sizes), tokenizer, 8192, 2)


LONG = "word " * 300


@pytest.fixture
def half_truncated(data_file):
    """Return 20 pairs and their order. Every second question fills max_length."""
    rows = [PAIR | {"instruction": LONG if i % 2 else "Name a number.", "output": f"answer {i}"} for i in range(20)]
    return data_file(rows), np.random.default_rng(42).permutation(20).tolist()


@pytest.mark.parametrize(("samples", "evaluated"), [(4, 3), (10, 0), (None, 2)])
def test_sample_without_labels_is_replaced_by_the_next_row(tokenizer, half_truncated, samples, evaluated):
    dataset, order = half_truncated
    found = prepare(dataset.model_copy(update={"samples": samples, "eval_samples": evaluated}), tokenizer, 8192, 2)
    usable = [index for index in order if index % 2 == 0]
    wanted = usable[: 10 if samples is None else samples + evaluated]
    drawn = order if samples is None else order[: order.index(wanted[-1])]
    left_out = sum(index % 2 for index in drawn)
    assert left_out
    assert answers_of(tokenizer, flat([*found.train, *found.evaluation])) == [f"answer {index}" for index in wanted]
    assert len(found.evaluation) == evaluated
    rows = "1 row" if left_out == 1 else f"{left_out} rows"
    assert found.warnings == [f"skipped {rows} of file with the answer beyond max_length 128"]


@pytest.mark.parametrize(("output", "truncated"), [("Blue.", 0), (LONG, 1)])
def test_complete_and_truncated_answers_are_kept(tokenizer, data_file, output, truncated):
    found = prepare(data_file([PAIR | {"output": output}]), tokenizer, 8192, 2)
    assert (found.description["truncated"], found.warnings) == (truncated, [])


def test_truncated_question_is_kept_with_loss_on_all(tokenizer, half_truncated):
    found = prepare(half_truncated[0].model_copy(update={"loss_on": "all"}), tokenizer, 8192, 2)
    assert (len(found.train), found.warnings) == (20, [])


def test_too_few_rows_within_max_length_are_an_error(tokenizer, half_truncated):
    message = r"has only 20 rows, 10 of them with the answer beyond max_length: too few for 11 samples"
    with pytest.raises(SpecError, match=message):
        prepare(half_truncated[0].model_copy(update={"samples": 11}), tokenizer, 8192, 2)


@pytest.mark.parametrize("template", [True, False], ids=["chat template", "none"])
def test_unpaired_surrogate_is_an_error_with_its_row(tokenizer, data_file, monkeypatch, template):
    if not template:
        monkeypatch.setattr(tokenizer, "chat_template", None)
    dataset = data_file([PAIR] * 3, "half.jsonl")
    with open(dataset.path, "a") as file:
        file.write(json.dumps(PAIR | {"output": "half \ud83d"}) + "\n")  # valid JSON
    with pytest.raises(DataError, match=r"half\.jsonl, line 4: "):
        prepare(dataset, tokenizer, 8192, 2)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("{{ raise_exception('not this one') }}", "not this one"),
        ("{{ 1 // 0 }}", "division"),
    ],
)
def test_chat_template_error_names_the_row(tokenizer, data_file, monkeypatch, code, reason):
    refusing = f"{{% if messages[0].content == 'No' %}}{code}{{% endif %}}{CHAT_TEMPLATE}"
    monkeypatch.setattr(tokenizer, "chat_template", refusing)
    with pytest.raises(DataError, match=rf"data\.jsonl, line 2: .* failed \(.*{reason}"):
        prepare(data_file([PAIR, PAIR | {"instruction": "No"}]), tokenizer, 8192, 2)


def test_prompts_that_fill_all_samples_are_an_error(tokenizer, data_file):
    with pytest.raises(DataError, match="the answer of every row is beyond max_length 4"):
        prepare(data_file([PAIR]).model_copy(update={"max_length": 4}), tokenizer, 8192, 2)


@pytest.mark.parametrize("mean", [20.0, 1500.0])
def test_synthetic_lengths_have_the_requested_mean(mean):
    drawn = synthetic_lengths(Dataset(name="synthetic", samples=1, mean_length=mean), 2000)
    assert np.mean(drawn) == pytest.approx(mean, rel=0.005)
    assert min(drawn) >= 2
    assert max(drawn) <= 2048


def test_synthetic_data_is_deterministic_and_within_the_vocabulary():
    dataset = Dataset(name="synthetic", samples=1, like="japanese-alpaca")
    first, again = (synthetic.draw(dataset, 50, 100) for _ in range(2))
    assert first == again
    assert max(max(sample.ids) for sample in first) < 100
    assert [len(s.ids) for s in first] == synthetic_lengths(dataset, 50)


def test_random_structure_keeps_tokens_and_fingerprint():
    tokens = [
        t for sample in synthetic.draw(Dataset(name="synthetic", samples=3, length=4), 3, 1000) for t in sample.ids
    ]
    assert tokens == np.random.default_rng(42).integers(0, 1000, size=12).tolist()
    named, unnamed = (spec_of(dataset={"samples": 3, **more}) for more in ({"structure": "random"}, {}))
    assert fingerprint(named) == fingerprint(unnamed)


def test_data_set_of_unusable_rows_says_why(tokenizer, monkeypatch, data_file, tmp_path):
    rows = open_rows(data_file([PAIR | {"output": ""}] * 3))
    monkeypatch.setattr(preparing, "open_rows", lambda _: rows)
    with pytest.raises(DataError, match=r"line \d: `output` is empty"):
        prepare(Dataset(name="owner/set"), tokenizer, 8192, 2)
    monkeypatch.setattr(sources, "open_rows", lambda _: rows)
    with pytest.raises(DataError, match=r"line \d: `output` is empty"):  # `ftbench data`
        sources.export(Dataset(name="owner/set"), tmp_path / "rows.jsonl", 1000)


# --- the hub ---------------------------------------------------------------------------------------------------------


def test_subset_and_split_select_a_part_of_the_data_set(tmp_path, monkeypatch):
    """A local folder replaces the hub, because the library reads both in the same way."""
    folder = tmp_path / "owner" / "set"
    folder.mkdir(parents=True)
    configs = []
    for subset in ("one", "two"):
        files = [{"split": split, "path": f"{subset}-{split}.jsonl"} for split in ("train", "test")]
        configs.append({"config_name": subset, "data_files": files})
        for file in files:
            (folder / file["path"]).write_text(json.dumps({"question": subset, "answer": file["split"]}) + "\n")
    (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    parts = [Dataset(name="owner/set", subset="one"), Dataset(name="owner/set", subset="two", split="test")]
    read = [[rows[index] for index in range(len(rows))] for rows in map(open_rows, parts)]
    assert read == [[{"question": "one", "answer": "train"}], [{"question": "two", "answer": "test"}]]


def test_a_row_of_a_hub_data_set_can_have_no_class():
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = sources.HubRows(
        "x", datasets.Dataset.from_dict({"text": ["a"] * 3, "label": [1, -1, None]}, features=features)
    )
    assert [rows[index]["label"] for index in range(3)] == ["yes", None, None]
