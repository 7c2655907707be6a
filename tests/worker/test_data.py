"""Data: rows become the tokens a person would expect, and the statistics are those of the tokens."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
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
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker.data import prepare as preparing
from ftbench.worker.data import synthetic
from ftbench.worker.data import tokens as tokens_module
from ftbench.worker.data.sources import open_rows
from ftbench.worker.data.tokens import IGNORE, tokenise
from ftbench.worker.model.tokenizer import CHAT_TEMPLATE, build_tokenizer, save_tokenizer


def prepare(dataset: Dataset, tokenizer: object, vocabulary: int, batch_size: int) -> preparing.Prepared:
    spec = spec_of(train={"batch_size": batch_size}).model_copy(update={"dataset": dataset})
    return preparing.prepare(spec, tokenizer, vocabulary)


def flat(rows: list) -> list:
    """What stands in the rows, one after the other."""
    return [sample for row in rows for sample in row]


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


# As Qwen3's: the last answer is opened by an empty thought, and is written without it once another turn follows.
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
    """A tokenizer whose template writes an answer differently when another turn follows."""
    made = build_tokenizer(8192)
    made.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    made.chat_template = THINKING
    return made


def learned_parts(tokenizer, *contents):
    """What carries loss of a dialogue of user and assistant in turn, as text, each unbroken part by itself."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    tokens = tokenise(tokenizer, example({"messages": turns}, "messages"), 512, "completion")
    assert all(label in (token, IGNORE) for token, label in zip(tokens.ids, tokens.labels, strict=True))
    parts = groupby(tokens.labels, lambda label: label != IGNORE)
    return [tokenizer.decode(list(labels)) for learned, labels in parts if learned]


def test_a_template_that_writes_an_answer_differently_later_does_so_here(thinking):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    written, followed = (
        thinking.apply_chat_template(dialogue, tokenize=False)
        for dialogue in (turns, [*turns, {"role": "user", "content": "Bye"}])
    )
    assert not followed.startswith(written)


@pytest.mark.parametrize(
    "answers",
    [
        ("Hello.",),
        ("Hello.", "See you."),
        ("Hello.", "Yes.", "No.", "See you."),
        ("Same.", "Same.", "Same."),
        ("Hello!\n\n", "  See\nyou"),
        ("こんにちは。", "さようなら"),
        ("Who?", "What ?", "Why ? ?", "How??"),
        ("Who !", "What ?"),
        ("?", " ?", "!"),
        ("user", "assistant", "<think>"),
    ],
    ids=str,
)
def test_every_answer_and_its_end_carry_loss_where_a_template_writes_it_differently_later(thinking, answers):
    contents = [content for n, answer in enumerate(answers) for content in (f"Question {n} ?", answer)]
    wanted = [*(answer + CLOSED for answer in answers[:-1]), THOUGHT + answers[-1] + CLOSED]
    assert learned_parts(thinking, *contents) == wanted


def test_answers_of_a_dialogue_that_ends_with_a_question_carry_loss_with_their_end(thinking):
    assert learned_parts(thinking, "Hi", "Hello.", "And", "Yes.", "Bye") == ["Hello." + CLOSED, "Yes." + CLOSED]


class Renderings:
    """A tokenizer that counts how many turns its template was given."""

    def __init__(self, tokenizer):
        self._tokenizer, self.turns = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments, **options):
        return self._tokenizer(*arguments, **options)

    def apply_chat_template(self, messages, **options):
        self.turns += len(messages)
        return self._tokenizer.apply_chat_template(messages, **options)


TRIMMING = THINKING.replace("message.content", "message.content | trim")
CHANGING = THINKING.replace("message.content", "message.content | upper")


@pytest.mark.parametrize("template", [THINKING, TRIMMING, CHANGING, CHAT_TEMPLATE])
def test_a_long_dialogue_carries_loss_where_one_comparison_an_answer_finds_it(thinking, monkeypatch, template):
    monkeypatch.setattr(thinking, "chat_template", template)
    chance, words = np.random.default_rng(5), ["a", "Hello.", "?", "! ", " x", "\n", "日本", "<think>", "qx0x", "  "]
    for count in (18, 25, 40):
        contents = [f"{''.join(chance.choice(words, 4))}.{chance.choice(['', ' '])}" for _ in range(count)]
        marked = learned_parts(thinking, *contents)
        with monkeypatch.context() as patch:
            patch.setattr(tokens_module, "FEW", count)
            assert marked == learned_parts(thinking, *contents)


@pytest.mark.parametrize("template", [THINKING, TRIMMING, CHAT_TEMPLATE])
def test_a_long_dialogue_is_rendered_a_few_times_whatever_its_length(thinking, monkeypatch, template):
    monkeypatch.setattr(thinking, "chat_template", template)
    tokenizer = Renderings(thinking)
    learned_parts(tokenizer, *(f"words and words {n}. " for n in range(400)))
    assert tokenizer.turns < 10 * 400


@pytest.mark.parametrize("answers", [("Hello.", "See you."), ("Who ?", "What ?"), ("Same.", "Same.")], ids=str)
def test_every_answer_and_its_end_carry_loss_with_the_template_that_ships(tokenizer, answers):
    first, last = answers
    assert learned_parts(tokenizer, "Hi ?", first, "Bye ?", last) == [f"{first}<eos>\n", f"{last}<eos>\n"]


def test_a_template_that_writes_the_date_gives_the_same_tokens_on_any_day(tokenizer, data_file, monkeypatch):
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
    assert ["29 February 2024" in plain[0], "05 December 2031" in plain[1]] == [True, True]  # the clock was set
    assert found[0] == found[1]
    assert "<turn>system\nToday is " in tokenizer.decode(found[0].train[0][0].ids)


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
    answers = [
        tokenizer.decode([t for t in s.labels if t != IGNORE]).removesuffix("<eos>\n") for s in flat(found.train)
    ]
    assert answers == wanted["output"]


def test_samples_for_evaluation_are_never_trained_on(tokenizer, data_file):
    rows = [PAIR | {"output": f"answer {i}"} for i in range(10)]
    found = prepare(data_file(rows).model_copy(update={"eval_samples": 3}), tokenizer, 8192, 2)
    assert len(found.train) == 7
    assert not {tuple(s.ids) for s in flat(found.train)} & {tuple(s.ids) for s in flat(found.evaluation)}


def test_asking_for_more_samples_than_there_are_is_refused(tokenizer, data_file):
    with pytest.raises(SpecError, match=r"has 1 row: too few for 5 samples and 0 to .* Lower dataset\.samples"):
        prepare(data_file([PAIR]).model_copy(update={"samples": 5}), tokenizer, 8192, 2)


def test_setting_every_sample_aside_for_evaluation_is_refused(tokenizer, data_file):
    with pytest.raises(SpecError, match=r"has 2 rows: too few for 1 sample and 2 to .* dataset\.eval_samples"):
        prepare(data_file([PAIR] * 2).model_copy(update={"eval_samples": 2}), tokenizer, 8192, 2)


LONG = "word " * 300


@pytest.fixture
def half_silent(data_file):
    """Twenty pairs; the question of every second one fills max_length. With the order they are drawn in."""
    rows = [PAIR | {"instruction": LONG if i % 2 else "Name a number.", "output": f"answer {i}"} for i in range(20)]
    return data_file(rows), np.random.default_rng(42).permutation(20).tolist()


def answers_of(tokenizer, samples):
    return [tokenizer.decode([t for t in s.labels if t != IGNORE]).removesuffix("<eos>\n") for s in samples]


@pytest.mark.parametrize(("samples", "evaluated"), [(5, 0), (4, 3), (10, 0), (None, 0), (None, 2)])
def test_a_sample_whose_answer_lies_beyond_max_length_gives_way_to_the_next_row(
    tokenizer, half_silent, samples, evaluated
):
    dataset, order = half_silent
    found = prepare(dataset.model_copy(update={"samples": samples, "eval_samples": evaluated}), tokenizer, 8192, 2)
    usable = [index for index in order if index % 2 == 0]
    wanted = usable[: 10 if samples is None else samples + evaluated]
    drawn = order if samples is None else order[: order.index(wanted[-1])]
    left_out = sum(index % 2 for index in drawn)
    assert left_out
    assert answers_of(tokenizer, flat([*found.train, *found.evaluation])) == [f"answer {index}" for index in wanted]
    assert len(found.evaluation) == evaluated
    rows = "1 row" if left_out == 1 else f"{left_out} rows"
    assert found.warnings == [f"left out: {rows} of file whose answer lies beyond max_length 128"]


def test_samples_that_all_fit_are_not_warned_of(tokenizer, data_file):
    assert prepare(data_file([PAIR] * 4), tokenizer, 8192, 2).warnings == []


def test_an_answer_that_is_cut_is_kept(tokenizer, data_file):
    found = prepare(data_file([PAIR | {"output": LONG}]), tokenizer, 8192, 2)
    assert (found.description["truncated"], found.warnings) == (1, [])


def test_a_question_that_fills_a_sample_is_kept_where_all_tokens_carry_loss(tokenizer, half_silent):
    found = prepare(half_silent[0].model_copy(update={"loss_on": "all"}), tokenizer, 8192, 2)
    assert (len(found.train), found.warnings) == (20, [])


def test_too_few_rows_with_their_answer_within_max_length_are_refused(tokenizer, half_silent):
    told = r"has 20 rows, 10 of them with their answer beyond max_length: too few for 11 samples"
    with pytest.raises(SpecError, match=told):
        prepare(half_silent[0].model_copy(update={"samples": 11}), tokenizer, 8192, 2)


@pytest.mark.parametrize("template", [True, False], ids=["chat template", "none"])
@pytest.mark.parametrize(
    ("whole", "broken"),
    [
        (PAIR, PAIR | {"output": "half \ud83d"}),
        (PAIR, PAIR | {"instruction": "\udc00 half"}),
        ({"text": "once"}, {"text": "half \ud83d"}),
    ],
    ids=["answer", "question", "text"],
)
def test_half_a_character_is_refused_with_the_row_it_stands_in(
    tokenizer, data_file, monkeypatch, whole, broken, template
):
    if not template:
        monkeypatch.setattr(tokenizer, "chat_template", None)
    dataset = data_file([whole] * 3, "half.jsonl")
    with open(dataset.path, "a") as file:
        file.write(json.dumps(broken) + "\n")  # as JSON escapes it, which is valid
    with pytest.raises(DataError, match=r"half\.jsonl, line 4: "):
        prepare(dataset, tokenizer, 8192, 2)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("{{ raise_exception('not this one') }}", "not this one"),
        ("{{ 1 // 0 }}", "division"),
        ("{% for each in range(10 ** 8) %}{% endfor %}", "Range too big"),
        ("{{ messages[9].content.nothing }}", "has no element 9"),
    ],
)
def test_a_row_that_the_chat_template_refuses_is_named(tokenizer, data_file, monkeypatch, does, said):
    refusing = f"{{% if messages[0].content == 'No' %}}{does}{{% endif %}}{CHAT_TEMPLATE}"
    monkeypatch.setattr(tokenizer, "chat_template", refusing)
    with pytest.raises(DataError, match=rf"data\.jsonl, line 2: .* refuses it \(.*{said}"):
        prepare(data_file([PAIR, PAIR | {"instruction": "No"}]), tokenizer, 8192, 2)


def test_prompts_that_fill_every_sample_are_refused(tokenizer, data_file):
    with pytest.raises(DataError, match="no token carries loss"):
        prepare(data_file([PAIR]).model_copy(update={"max_length": 4}), tokenizer, 8192, 2)


def test_the_shipped_sample_is_two_hundred_pairs_that_all_fit(tokenizer):
    found = prepare(Dataset(name="sample"), tokenizer, 8192, 4).description
    assert found["samples"] == 200
    assert found["truncated"] == 0


@pytest.mark.parametrize("mean", [20.0, 117.0, 861.0, 1500.0])
def test_synthetic_lengths_meet_their_mean_after_cutting(mean):
    drawn = synthetic_lengths(Dataset(name="synthetic", samples=1, mean_length=mean), 2000)
    assert np.mean(drawn) == pytest.approx(mean, rel=0.005)
    assert min(drawn) >= 2
    assert max(drawn) <= 2048


def test_synthetic_data_is_the_same_each_time_and_within_the_vocabulary():
    dataset = Dataset(name="synthetic", samples=1, like="japanese-alpaca")
    first, again = (synthetic.draw(dataset, 50, 100) for _ in range(2))
    assert first == again
    assert max(max(sample.ids) for sample in first) < 100
    assert [len(s.ids) for s in first] == synthetic_lengths(dataset, 50)


def test_a_markov_chain_has_the_entropy_that_its_description_says():
    dataset = Dataset(name="synthetic", samples=400, length=250, structure="markov", eval_samples=40)
    data = prepare(dataset, None, 150_000, 4)
    walks = [sample.ids for sample in flat(data.train)]
    pairs = Counter(pair for ids in walks for pair in itertools.pairwise(ids))
    firsts = Counter(first for pair in pairs.elements() for first in pair[:1])
    total = sum(pairs.values())
    measured = -sum(n / total * math.log(n / firsts[first]) for (first, _), n in pairs.items())
    assert measured == pytest.approx(data.description["entropy_nats"], abs=0.01)  # of 100,000 pairs
    assert set(firsts.values()) < set(range(total // 32, total // 8))  # sixteen tokens, each about as often
    held_out = {pair for sample in flat(data.evaluation) for pair in itertools.pairwise(sample.ids)}
    assert len(flat(data.evaluation)) == 40
    assert held_out <= pairs.keys()  # of the same chain
    assert not {tuple(sample.ids) for sample in flat(data.evaluation)} & set(map(tuple, walks))


def test_a_markov_chain_is_the_same_each_time_and_another_with_another_seed():
    dataset = Dataset(name="synthetic", samples=1, like="japanese-alpaca", structure="markov")
    first, again = (synthetic.draw(dataset, 50, 100) for _ in range(2))
    assert first == again
    assert [len(s.ids) for s in first] == synthetic_lengths(dataset, 50)
    assert first != synthetic.draw(dataset.model_copy(update={"seed": 43}), 50, 100)
    assert synthetic.draw(dataset, 4, 2)  # of the smallest vocabulary too


def test_random_tokens_are_what_they_were_before_there_were_chains():
    tokens = [
        t for sample in synthetic.draw(Dataset(name="synthetic", samples=3, length=4), 3, 1000) for t in sample.ids
    ]
    assert tokens == np.random.default_rng(42).integers(0, 1000, size=12).tolist()
    named, unnamed = (spec_of(dataset={"samples": 3, **more}) for more in ({"structure": "random"}, {}))
    assert fingerprint(named) == fingerprint(unnamed)
    assert "entropy_nats" not in prepare(unnamed.dataset, None, 1000, 1).description


@pytest.mark.parametrize(("method", "falls_by"), [("full", 0.5), ("lora", 0.05)])
def test_a_random_model_learns_a_chain_within_a_hundred_steps(train_here, method, falls_by):
    """A frozen random output head bounds what adapters on a hidden size of 64 can reach; they still fall by a tenth."""
    run = train_here(
        method={"name": method},
        dataset={"mean_length": None, "length": 64, "samples": 400, "structure": "markov", "eval_samples": 8},
        train={"batch_size": 4, "lr_scheduler": "constant"},
    )
    steps, _ = read_steps(run.steps)
    assert steps[-1].phase == "evaluate"
    assert steps[-1].loss < steps[0].loss * (1 - falls_by)
    assert steps[-1].loss > read_json(run.applied)["dataset"]["entropy_nats"]


# --- the hub ---------------------------------------------------------------------------------------------------------


def test_subset_and_split_name_the_part_of_a_set_that_is_read(tmp_path, monkeypatch):
    """A folder of this name stands for a set on the hub: the library reads both alike."""
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
