"""What is a secret, in which forms it is found, and what is none."""

from __future__ import annotations

import ast
import html
import json
import os
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

import ftbench
from ftbench.core.redact import REDACTED, clean, redact, secretless
from ftbench.core.table import text_table

TOKEN = "hf_" + "AbCdEfGhIj" * 3
HARD = "pa\"ss\\wo'rd <1>é"


@pytest.mark.parametrize(
    "name",
    ["DB_PASS", "MYSQL_PWD", "STRIPE_KEY", "SSH_KEYS", "BASIC_AUTH", "GITHUB_PAT", "SENTRY_DSN", "TOKEN_HF", "HF_TOKEN",
     "MY_PASSWORD", "aws_secret_access_key", "PASS", "API_TOKENS"],
)  # fmt: skip
def test_a_variable_s_value_is_found_wherever_it_stands(name):
    assert redact("login with hunter2hunter2 failed", {name: "hunter2hunter2"}) == (f"login with {REDACTED} failed", 1)


@pytest.mark.parametrize(
    "name", ["PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "KEYBOARD", "PATH", "HF_TOKEN_PATH", "SSH_AUTH_SOCK", "COMPASS"]
)
def test_a_variable_of_another_name_is_none(name):
    assert redact("work in /some/place", {name: "/some/place"}) == ("work in /some/place", 0)


@pytest.mark.parametrize(
    "written",
    [str, json.dumps, lambda text: json.dumps(text, ensure_ascii=False), lambda text: json.dumps(json.dumps(text)),
     html.escape, repr, lambda text: quote(text, safe=""), lambda text: text.replace('"', '""'),
     lambda text: html.escape(json.dumps(text)),
     lambda text: yaml.safe_dump(text, default_style="'", allow_unicode=True)],
)  # fmt: skip
def test_it_is_found_in_every_form_that_a_file_gives_it(written):
    text = written(f"a {HARD} b")
    redacted, count = redact(text, {"DB_PASS": HARD})
    assert count == 1
    assert "wo" not in redacted.replace("word", "wo")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('password="a\\"b secret" x', 'password="[redacted]" x'),
        ("password: 'it''s secret'", "password: '[redacted]'"),
        ('{"said": "api_key=\\"a\\\\\\"b secret\\" x"}', '{"said": "api_key=\\"[redacted]\\" x"}'),
        ('api_key: "ends with \\\\"', 'api_key: "[redacted]"'),
        ("DB_PASS=secret1 MYSQL_PWD: secret2", "DB_PASS=[redacted] MYSQL_PWD: [redacted]"),
        ("TOKEN_HF=secret1", "TOKEN_HF=[redacted]"),
        ("https://me:se\"cr'et@example.com/x", "https://me:[redacted]@example.com/x"),
        ('secret="never closed', 'secret="[redacted] closed'),
        (f"Bearer {TOKEN}", "Bearer [redacted]"),
    ],
)
def test_a_named_value_goes_whole_with_its_quotes(text, left):
    assert redact(text, {})[0] == left
    assert redact(left, {}) == (left, 0), "what is redacted stays as it is"


@pytest.mark.parametrize(
    "text",
    ['{"url":"http://host:80","mail":"me@example.com"}', '{"max_token": 12345, "token": null}', "tokens/s: 12,345",
     "the key: nothing", "cache_key=abcdef", "password: ab", "a monkey: eats"],
)  # fmt: skip
def test_words_and_figures_stay(text):
    assert redact(text, {}) == (text, 0)


def test_a_document_is_cleaned_as_a_document(monkeypatch):
    monkeypatch.setitem(os.environ, "DB_PASS", HARD)
    document = {"api_key": "x, y", "n": 3, HARD: [HARD, (f"{TOKEN}!", None)], "state": "ok"}
    assert clean(document) == {
        "api_key": REDACTED, "n": 3, REDACTED: [REDACTED, (f"{REDACTED}!", None)], "state": "ok"
    }  # fmt: skip
    assert secretless(f"with {HARD}") == f"with {REDACTED}"


def test_no_sentence_of_ours_is_taken_for_a_secret():
    """Whoever is told that a secret was redacted would look for one."""
    texts = []
    for path in Path(ftbench.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "word" for part in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    assert len(texts) > 5000
    assert [text for text in texts if redact(text, {})[1]] == []


def test_a_secret_goes_before_its_lines_and_spaces_do(monkeypatch):
    monkeypatch.setenv("DB_PASS", "first\tword\nsecond line and  more of it")
    secret = os.environ["DB_PASS"]
    table = text_table(["name", "what"], [["a", secret], ["b", f"behind {secret}"]], width=40)
    assert table.count(REDACTED) == 2
    assert not {"first", "second", "more"} & set(table.split())


@pytest.mark.parametrize("shown", ["https://mine@db.test/1", "https:/mine@db.test/1", Path("https://mine@db.test/1")])
def test_an_address_is_a_secret_also_where_it_is_taken_for_a_path(shown):
    assert redact(f"{shown}: no such file", {"DB_DSN": "https://mine@db.test/1"})[0] == f"{REDACTED}: no such file"
    assert "word" not in redact(str(shown).replace("mine", "me:word"), {})[0]
