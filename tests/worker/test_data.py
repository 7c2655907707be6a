"""Data: rows become the tokens a person would expect, and the statistics are those of the tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from ftbench.errors import DataError, SpecError
from ftbench.spec.datasets import Dataset
from ftbench.worker.data import synthetic
from ftbench.worker.data.formats import BadRow, detect, example
from ftbench.worker.data.prepare import prepare
from ftbench.worker.data.tokens import IGNORE, tokenise
from ftbench.worker.tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, 8192)
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
def test_the_format_is_found_from_the_columns(columns, format_name):
    assert detect(columns, "file") == format_name


def test_columns_of_no_format_are_named_with_what_would_fit():
    with pytest.raises(DataError, match=r"columns a, b fit no format \(alpaca: instruction, output"):
        detect(["b", "a"], "file")


def test_only_the_answer_carries_loss(tokenizer):
    tokens = tokenise(tokenizer, example(PAIR, "alpaca"), 128, "completion")
    learned = [label for label in tokens.labels if label != IGNORE]
    assert tokenizer.decode(learned) == "Blue.<eos>\n"
    assert tokenizer.decode(tokens.ids) == "<turn>user\nName a colour.<eos>\n<turn>assistant\nBlue.<eos>\n"


def test_every_answer_of_a_dialogue_carries_loss_and_no_question_does(tokenizer):
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


def test_share_gpt_turns_are_the_same_dialogue(tokenizer):
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    shared = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
    assert example(chat, "messages") == example(shared, "messages")


def test_loss_on_all_labels_every_token(tokenizer):
    tokens = tokenise(tokenizer, example(PAIR, "alpaca"), 128, "all")
    assert tokens.labels == tokens.ids


def test_text_is_ended_and_carries_loss_throughout(tokenizer):
    tokens = tokenise(tokenizer, example({"text": "once"}, "text"), 128, "completion")
    assert tokens.ids[-1] == tokenizer.eos_token_id
    assert tokens.labels == tokens.ids


def test_a_tokenizer_without_chat_template_separates_turns_by_empty_lines(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    tokens = tokenise(tokenizer, example(PAIR, "alpaca"), 128, "completion")
    assert tokenizer.decode(tokens.ids) == "Name a colour.\n\nBlue.<eos>"


def test_wikipedia_asks_with_the_body_without_its_first_sentence_for_the_title():
    row = {"title": "富士山", "text": "富士山は日本の山である。標高は3776メートル。静岡県と山梨県にまたがる。"}
    (question, answer) = example(row, "wikipedia-title").messages
    assert question["content"] == "標高は3776メートル。静岡県と山梨県にまたがる。"
    assert answer["content"] == "富士山"
    with pytest.raises(BadRow, match="one sentence"):
        example({"title": "x", "text": "一文だけ。"}, "wikipedia-title")


def test_statistics_are_those_of_the_tokens(tokenizer, data_file):
    rows = [PAIR | {"output": "word " * n} for n in (1, 40, 80, 300)]
    found = prepare(data_file(rows), tokenizer, 8192, 2).description
    assert found["samples"] == 4
    assert found["truncated"] == 1
    assert found["tokens"]["max"] == 128
    assert found["tokens_before_truncation"]["max"] > 300
    assert sum(found["tokens"]["histogram"]["counts"]) == 4
    assert found["packing_gain"] == pytest.approx(found["packing_efficiency"] / found["padding_efficiency"])


def test_samples_are_drawn_as_datasets_shuffle_draws_them(tokenizer, data_file):
    import datasets

    rows = [PAIR | {"output": f"answer {i}"} for i in range(30)]
    chosen = data_file(rows).model_copy(update={"samples": 5})
    found = prepare(chosen, tokenizer, 8192, 2)
    wanted = datasets.Dataset.from_list(rows).shuffle(seed=42).select(range(5))
    answers = [tokenizer.decode([t for t in s.labels if t != IGNORE]).removesuffix("<eos>\n") for s in found.train]
    assert answers == wanted["output"]


def test_samples_for_evaluation_are_never_trained_on(tokenizer, data_file):
    rows = [PAIR | {"output": f"answer {i}"} for i in range(10)]
    found = prepare(data_file(rows).model_copy(update={"eval_samples": 3}), tokenizer, 8192, 2)
    assert len(found.train) == 7
    assert not {tuple(s.ids) for s in found.train} & {tuple(s.ids) for s in found.evaluation}


def test_asking_for_more_samples_than_there_are_is_refused(tokenizer, data_file):
    with pytest.raises(SpecError, match=r"has 1 rows, too few .* lower dataset\.samples"):
        prepare(data_file([PAIR]).model_copy(update={"samples": 5}), tokenizer, 8192, 2)


def test_prompts_that_fill_every_sample_are_refused(tokenizer, data_file):
    with pytest.raises(DataError, match="no token carries loss"):
        prepare(data_file([PAIR]).model_copy(update={"max_length": 4}), tokenizer, 8192, 2)


def test_the_shipped_sample_is_two_hundred_pairs_that_all_fit(tokenizer):
    found = prepare(Dataset(name="sample"), tokenizer, 8192, 4).description
    assert found["samples"] == 200
    assert found["truncated"] == 0


@pytest.mark.parametrize("mean", [20.0, 117.0, 861.0, 1500.0])
def test_synthetic_lengths_meet_their_mean_after_cutting(mean):
    drawn = synthetic.lengths(Dataset(name="synthetic", samples=1, mean_length=mean), 2000)
    assert np.mean(drawn) == pytest.approx(mean, rel=0.005)
    assert min(drawn) >= 2
    assert max(drawn) <= 2048


def test_synthetic_data_is_the_same_each_time_and_within_the_vocabulary():
    dataset = Dataset(name="synthetic", samples=1, like="japanese-alpaca")
    first, again = (synthetic.draw(dataset, 50, 100) for _ in range(2))
    assert first == again
    assert max(max(sample.ids) for sample in first) < 100
    assert [len(s.ids) for s in first] == synthetic.lengths(dataset, 50)
