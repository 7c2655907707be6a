"""Secrets are found in every escaped form, and ordinary text is not redacted."""

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
from ftbench.core.redact import REDACTED, redact, redact_document, without_secrets

TOKEN = "hf_" + "AbCdEfGhIj" * 3
HARD = "pa\"ss\\wo'rd <1>é"


@pytest.mark.parametrize(
    "name",
    ["DB_PASS", "MYSQL_PWD", "SSH_KEYS", "SENTRY_DSN", "TOKEN_HF", "MY_PASSWORD", "aws_secret_access_key", "PASS"],
)
def test_the_value_of_a_secret_variable_is_redacted(name):
    assert redact("login with hunter2hunter2 failed", {name: "hunter2hunter2"}) == f"login with {REDACTED} failed"


@pytest.mark.parametrize(
    "name", ["OLDPWD", "TOKENIZERS_PARALLELISM", "KEYBOARD", "HF_TOKEN_PATH", "SSH_AUTH_SOCK", "COMPASS"]
)
def test_the_value_of_another_variable_is_kept(name):
    assert redact("work in /some/place", {name: "/some/place"}) == "work in /some/place"


@pytest.mark.parametrize(
    "written",
    [str, json.dumps, lambda text: json.dumps(text, ensure_ascii=False), lambda text: json.dumps(json.dumps(text)),
     html.escape, repr, lambda text: quote(text, safe=""), lambda text: text.replace('"', '""'),
     lambda text: html.escape(json.dumps(text)),
     lambda text: yaml.safe_dump(text, default_style="'", allow_unicode=True)],
)  # fmt: skip
def test_escaped_values_are_redacted(written):
    text = written(f"a {HARD} b")
    redacted = redact(text, {"DB_PASS": HARD})
    assert redacted.count(REDACTED) == 1
    assert "wo" not in redacted.replace("word", "wo")


@pytest.mark.parametrize("kind", ["hf_", "sk-", "ghp_", "Bearer ", "DB_PASS="])
@pytest.mark.parametrize("before", ["\n", "\u2028", ""])
def test_a_secret_at_the_start_of_a_line_is_redacted_in_json(kind, before):
    text = without_secrets(json.dumps({"reason": f"failed:{before or ' '}{kind}{TOKEN[3:]}"}))
    assert TOKEN[3:] not in text
    assert json.loads(text)["reason"].endswith(REDACTED)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('password="a\\"b secret" x', 'password="[redacted]" x'),
        ("password: 'it''s secret'", "password: '[redacted]'"),
        ('{"said": "api_key=\\"a\\\\\\"b secret\\" x"}', '{"said": "api_key=\\"[redacted]\\" x"}'),
        ('api_key: "ends with \\\\"', 'api_key: "[redacted]"'),
        ("DB_PASS=secret1 MYSQL_PWD: secret2", "DB_PASS=[redacted] MYSQL_PWD: [redacted]"),
        ("https://me:se\"cr'et@example.com/x", "https://me:[redacted]@example.com/x"),
        ('secret="never closed', 'secret="[redacted] closed'),
        (f"Bearer {TOKEN}", "Bearer [redacted]"),
    ],
)
def test_a_named_value_is_redacted_inside_its_quotes(text, left):
    assert redact(text, {}) == left
    assert redact(left, {}) == left, "redacting twice changes nothing"


@pytest.mark.parametrize(
    "text",
    ['{"url":"http://host:80","mail":"me@example.com"}', '{"max_token": 12345, "token": null}', "tokens/s: 12,345",
     "the key: nothing", "cache_key=abcdef", "password: ab", "a monkey: eats"],
)  # fmt: skip
def test_ordinary_text_is_kept(text):
    assert redact(text, {}) == text


def test_strings_and_keys_of_a_document_are_redacted(monkeypatch):
    monkeypatch.setitem(os.environ, "DB_PASS", HARD)
    document = {"api_key": "x, y", "n": 3, HARD: [HARD, [f"{TOKEN}!", None]], "state": "ok"}
    assert redact_document(document) == {
        "api_key": REDACTED, "n": 3, REDACTED: [REDACTED, [f"{REDACTED}!", None]], "state": "ok"
    }  # fmt: skip
    assert without_secrets(f"with {HARD}") == f"with {REDACTED}"


@pytest.mark.exhaustive
def test_no_message_of_ftbench_is_taken_for_a_secret():
    texts = []
    for path in Path(ftbench.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "word" for part in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    assert len(texts) > 5000
    assert [text for text in texts if redact(text, {}) != text] == []


@pytest.mark.parametrize("shown", ["https://mine@db.test/1", "https:/mine@db.test/1", Path("https://mine@db.test/1")])
def test_an_address_is_redacted_even_if_it_was_read_as_a_path(shown):
    assert redact(f"{shown}: no such file", {"DB_DSN": "https://mine@db.test/1"}) == f"{REDACTED}: no such file"
    assert "word" not in redact(str(shown).replace("mine", "me:word"), {})
