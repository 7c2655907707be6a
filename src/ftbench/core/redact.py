"""Replace secrets in text that leaves the machine: bundles, report files and logs.

Secrets are tokens in the format of a known issuer, values with a name like `api_key`, passwords in URLs, and values of
environment variables with a name like `HF_TOKEN`.
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
_WORDS = r"(?:token|secret|password|passwd|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)"
# Also after a JSON escape, such as a line break, which is written as the two characters \n
_START = r"(?:\b|(?<=\\[bfnrt])|(?<=\\u[0-9a-f]{4}))"
_VARIABLE = rf"{_START}(?:[A-Z][A-Z0-9_]*_(?:PASS|PWD|KEY|AUTH|PAT|DSN)|TOKEN_[A-Z0-9_]+)"
_SECRET_VARIABLE = re.compile(rf"(?i){_WORDS}s?(?:_|$)|(?:^|_)(?:pass|keys?|auth|pat|dsn)$|_pwd$")
_NAMES_A_PLACE = re.compile(r"(?i)_(?:path|file|dir|sock)$")
_SECRET_KEY = re.compile(rf"(?i:{_WORDS})$|{_VARIABLE}$")
# Key formats as published by their issuers. Code hosts scan for the same formats.
_SHAPES = re.compile(
    rf"(?=[hsgAxne-][fkhilKIovy-])(?:{_START}(?:hf_[A-Za-z0-9]{{16,}}|sk-[A-Za-z0-9_-]{{16,}}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}|AKIA[0-9A-Z]{16}\b"
    r"|AIza[A-Za-z0-9_-]{30,}|xox[abprs]-[A-Za-z0-9-]{10,}|nvapi-[A-Za-z0-9_-]{16,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z))",
    re.DOTALL,
)
# A quote belongs to the password unless a delimiter follows it.
_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://?[^\s/:@\"']*:)(?:[^\s/@\"']|[\"'](?![,:;)}\]>\s]))+(?=@)")
_BEARER = re.compile(rf"(?i){_START}(bearer\s+)[A-Za-z0-9._~+/-]{{12,}}=*")
_VALUE = (
    r"\"(?:[^\"\\\n]|\\.){4,}\""
    r"|'(?:[^'\\\n]|\\.|''){4,}'"
    r"|\\\"(?:[^\"\\\n]|\\\\(?:\\[\\\"]|[^\\])|\\[^\"\\]){4,}\\\""  # a secret name and its value inside a JSON string
    r"|[\"']?[^\s\"',;}\]]{4,}"
)
_PLAIN_JSON = re.compile(r"-?[\d.]+(?:[eE][+-]?\d+)?|true|false|null")
# The lookahead makes the search fast. With re.IGNORECASE, the characters ſ and K (Kelvin) match s and k.
_NAMED = re.compile(
    rf"(?=[tspacA-Z][oearpcA-Z0-9_][kcsieA-Z0-9_ſK])((?:(?i:{_WORDS})|{_VARIABLE})\\*[\"']?\s*[:=]\s*)(?!\\*[\"']?\[redacted\])({_VALUE})"
)


def redact(text: str, environment: Mapping[str, str]) -> str:
    """Return `text` with its secrets replaced. The value of an environment variable with a name like `HF_TOKEN` is also
    replaced in quoted or escaped form."""
    return _redacted(text, _secrets_of(environment))


def without_secrets(text: str) -> str:
    """Replace the secrets in `text`, including the secret environment variables of this process."""
    return redact(text, os.environ)


def redact_document(document: Any) -> Any:
    """Replace the secrets in all strings of a JSON document. Replace complete strings under keys like `api_key`."""
    secrets = _secrets_of(os.environ)

    def redacted(part: Any, key: str = "") -> Any:
        if isinstance(part, str):
            return REDACTED if len(part) >= 4 and _SECRET_KEY.search(key) else _redacted(part, secrets)
        if isinstance(part, dict):
            return {redacted(name): redacted(content, name) for name, content in part.items()}
        return [redacted(each) for each in part] if isinstance(part, list) else part

    return redacted(document)


def _redacted(text: str, secrets: tuple[str, ...]) -> str:
    for value in secrets:
        text = text.replace(value, REDACTED)
    lower = text.lower()
    for pattern, replacement, signs in _RULES:
        if all(any(sign in lower for sign in group) for group in signs):  # 100 times faster than the pattern
            text = pattern.sub(replacement, text)
    return text


def _keep_quotes(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    if '"' in name and _PLAIN_JSON.fullmatch(value):
        return match[0]
    quotes = next((mark for mark in ('\\"', '"', "'") if value.startswith(mark)), "")
    return f"{name}{quotes}{REDACTED}{quotes if value.endswith(quotes) else ''}"


# (pattern, replacement, groups of substrings). A text can only match if it contains a substring of each group.
_ISSUED = ("hf_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "akia", "aiza", "xox",
           "nvapi-", "eyj", "private key")  # fmt: skip
_NAMING = ("token", "secret", "pass", "key", "credential", "_pwd", "_auth", "_pat", "_dsn")
_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str], tuple[tuple[str, ...], ...]], ...] = (
    (_SHAPES, REDACTED, (_ISSUED,)),
    (_IN_URL, rf"\1{REDACTED}", ((":/",), ("@",))),
    (_BEARER, rf"\1{REDACTED}", (("bearer",),)),
    (_NAMED, _keep_quotes, ((":", "="), _NAMING)),
)


def _secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the secret values of an environment in plain and escaped forms, the longest first. Skip values with fewer
    than 8 characters, because short values may be ordinary words."""
    names = [name for name in environment if _SECRET_VARIABLE.search(name) and not _NAMES_A_PLACE.search(name)]
    return _forms(tuple(environment[name] for name in names if len(environment[name]) >= 8))


@lru_cache(maxsize=64)
def _forms(values: tuple[str, ...]) -> tuple[str, ...]:
    forms = set(values)
    for value in values:
        in_json = {json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False)}
        forms |= in_json | {json.dumps(text)[1:-1] for text in in_json}
        forms |= {html.escape(text) for text in (value, *in_json)}
        forms |= {re.sub("/+", "/", value)}  # the form in which pathlib prints it
        forms |= {value.replace('"', '""'), value.replace("'", "''"), repr(value)[1:-1], quote(value, safe="")}
    return tuple(sorted(forms, key=lambda value: (-len(value), value)))
