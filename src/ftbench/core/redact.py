"""Secrets out of text that leaves the machine: what looks like one, and what this process's environment calls one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

REDACTED = "[redacted]"
_NAMES = r"(?:token|secret|password|passwd|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)"
_SECRET_NAME = re.compile(rf"(?i){_NAMES}s?$")
# The shapes in which the issuers themselves publish their keys (and by which code hosts find leaked ones).
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}"
    r"|\bglpat-[A-Za-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[A-Za-z0-9_-]{30,}|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\bnvapi-[A-Za-z0-9_-]{16,}|\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^\s/:@\"']*:)[^\s/@\"']+(?=@)")
_BEARER = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/-]{12,}=*")
_NAMED = re.compile(rf"(?i)({_NAMES}[\"']?\s*[:=]\s*)(\"[^\"\n]{{4,}}\"|'[^'\n]{{4,}}'|[^\s\"',;}}\]]{{4,}})")


def redact(text: str, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return `text` with secrets replaced, and how many there were: keys of known shape, passwords in URLs, values of
    names like HF_TOKEN or api_key, and wherever it stands the value of a variable of `environment` with such a name."""
    count = 0
    for value in secrets_of(environment):
        count += text.count(value)
        text = text.replace(value, REDACTED)
    lower = text.lower()
    for pattern, replacement, signs in _RULES:
        if all(any(sign in lower for sign in group) for group in signs):  # a hundred times as fast as the pattern
            text, replaced = pattern.subn(replacement, text)
            count += replaced
    return text, count


def _keep_quotes(match: re.Match[str]) -> str:
    quote = match[2][0] if match[2][0] in "\"'" else ""
    return f"{match[1]}{quote}{REDACTED}{quote}"


# Each pattern with what replaces its matches, and groups of signs: a text without one of each group has no match.
_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str], tuple[tuple[str, ...], ...]], ...] = (
    (_SHAPES, REDACTED, (("hf_", "sk-", "gh", "glpat-", "akia", "aiza", "xox", "nvapi-", "eyj", "private key"),)),
    (_IN_URL, rf"\1{REDACTED}", (("://",), ("@",))),
    (_BEARER, rf"\1{REDACTED}", (("bearer",),)),
    (_NAMED, _keep_quotes, ((":", "="), ("token", "secret", "pass", "key", "credential"))),
)


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Return the values of the variables whose names say that they are secret, longest first; short ones are words."""
    secrets = {value for name, value in environment.items() if _SECRET_NAME.search(name) and len(value) >= 8}
    return sorted(secrets, key=lambda value: (-len(value), value))
