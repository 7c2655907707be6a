"""Secrets out of text that leaves the machine: what looks like one, and what this process's environment calls one.

Documents are cleaned before they are cut, folded or escaped (`clean`); whatever leaves goes through `secretless` once
more at the edge, which also knows the forms that a value takes when it is quoted.
"""

import html
import json
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

REDACTED = "[redacted]"
_NUMBERS = {int, float, bool, type(None)}
_WORDS = r"(?:token|secret|password|passwd|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)"
_VARIABLE = r"\b(?:[A-Z][A-Z0-9_]*_(?:PASS|PWD|KEY|AUTH|PAT|DSN)|TOKEN_[A-Z0-9_]+)"
_SECRET_VARIABLE = re.compile(rf"(?i){_WORDS}s?(?:_|$)|(?:^|_)(?:pass|keys?|auth|pat|dsn)$|_pwd$")
_NAMES_A_PLACE = re.compile(r"(?i)_(?:path|file|dir|sock)$")
_SECRET_KEY = re.compile(rf"(?i:{_WORDS})$|{_VARIABLE}$")
# The shapes in which the issuers themselves publish their keys (and by which code hosts find leaked ones).
_SHAPES = re.compile(
    r"(?=[hsgAxne-][fkhilKIovy-])(?:\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_[A-Za-z0-9_]{20,}|\bglpat-[A-Za-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[A-Za-z0-9_-]{30,}"
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bnvapi-[A-Za-z0-9_-]{16,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z))",
    re.DOTALL,
)
# A quote within a password is told from one that ends a text by what follows it.
_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://?[^\s/:@\"']*:)(?:[^\s/@\"']|[\"'](?![,:;)}\]>\s]))+(?=@)")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/-]{12,}=*")
_VALUE = (
    r"\"(?:[^\"\\\n]|\\.){4,}\""
    r"|'(?:[^'\\\n]|\\.|''){4,}'"
    r"|\\\"(?:[^\"\\\n]|\\\\(?:\\[\\\"]|[^\\])|\\[^\"\\]){4,}\\\""  # the same within a JSON text
    r"|[\"']?[^\s\"',;}\]]{4,}"
)
_PLAIN_JSON = re.compile(r"-?[\d.]+(?:[eE][+-]?\d+)?|true|false|null")
# The first letters spare the search most places of a long text; ſ and K are an s and a k in either case.
_NAMED = re.compile(
    rf"(?=[tspacA-Z][oearpcA-Z0-9_][kcsieA-Z0-9_ſK])((?:(?i:{_WORDS})|{_VARIABLE})\\*[\"']?\s*[:=]\s*)(?!\\*[\"']?\[redacted\])({_VALUE})"
)


def redact(text: str, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return `text` with secrets replaced, and how many: keys of known shape, passwords in URLs, values of names like
    HF_TOKEN or api_key, and wherever it stands, also quoted, the value of such a variable of `environment`."""
    redacted = _redacted(text, secrets_of(environment))
    return redacted, redacted.count(REDACTED) - text.count(REDACTED)


def secretless(text: str) -> str:
    """Return text that may leave the machine."""
    return redact(text, os.environ)[0]


def clean(value: Any) -> Any:
    """Return a document of dicts, lists and texts that may leave the machine, without what stands under secret keys."""
    secrets = secrets_of(os.environ)

    def cleaned(part: Any) -> Any:
        if isinstance(part, str):
            return _short_redacted(part, secrets)
        if isinstance(part, dict):
            return {
                _short_redacted(key, secrets) if type(key) is str else cleaned(key): content
                if type(content) in _NUMBERS
                else under(key, content)  # most are numbers
                for key, content in part.items()
            }
        if type(part) not in (list, tuple):
            return part
        return type(part)(each if type(each) in _NUMBERS else cleaned(each) for each in part)

    def under(key: Any, content: Any) -> Any:
        named = isinstance(content, str) and len(content) >= 4 and isinstance(key, str) and _SECRET_KEY.search(key)
        return REDACTED if named else cleaned(content)

    return cleaned(value)


def _redacted(text: str, secrets: tuple[str, ...]) -> str:
    for value in secrets:
        text = text.replace(value, REDACTED)
    lower = text.lower()
    for pattern, replacement, signs in _RULES:
        if all(any(sign in lower for sign in group) for group in signs):  # a hundred times as fast as the pattern
            text = pattern.sub(replacement, text)
    return text


_short_redacted = lru_cache(maxsize=65536)(_redacted)


def _keep_quotes(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    if '"' in name and _PLAIN_JSON.fullmatch(value):
        return match[0]
    quotes = next((mark for mark in ('\\"', '"', "'") if value.startswith(mark)), "")
    return f"{name}{quotes}{REDACTED}{quotes if value.endswith(quotes) else ''}"


# Each pattern with what replaces its matches, and groups of signs: a text without one of each group has no match.
_ISSUED = ("hf_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "akia", "aiza", "xox",
           "nvapi-", "eyj", "private key")  # fmt: skip
_NAMING = ("token", "secret", "pass", "key", "credential", "_pwd", "_auth", "_pat", "_dsn")
_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str], tuple[tuple[str, ...], ...]], ...] = (
    (_SHAPES, REDACTED, (_ISSUED,)),
    (_IN_URL, rf"\1{REDACTED}", ((":/",), ("@",))),
    (_BEARER, rf"\1{REDACTED}", (("bearer",),)),
    (_NAMED, _keep_quotes, ((":", "="), _NAMING)),
)


def secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of the variables whose names say that they are secret, each also as JSON, HTML, CSV, YAML and a
    URL write it, longest first; short ones are words."""
    # The name first: os.environ decodes a value each time it is asked for.
    named = (environment[name] for name in environment if _names_a_secret(name))
    return _forms(tuple(value for value in named if len(value) >= 8))


@lru_cache(maxsize=4096)  # asked of every variable for every document
def _names_a_secret(variable: str) -> bool:
    return bool(_SECRET_VARIABLE.search(variable)) and not _NAMES_A_PLACE.search(variable)


@lru_cache(maxsize=64)
def _forms(values: tuple[str, ...]) -> tuple[str, ...]:
    forms = set(values)
    for value in values:
        in_json = {json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False)}
        forms |= in_json | {json.dumps(text)[1:-1] for text in in_json}
        forms |= {html.escape(text) for text in (value, *in_json)}
        forms |= {re.sub("/+", "/", value)}  # as a path
        forms |= {value.replace('"', '""'), value.replace("'", "''"), repr(value)[1:-1], quote(value, safe="")}
    return tuple(sorted(forms, key=lambda value: (-len(value), value)))
