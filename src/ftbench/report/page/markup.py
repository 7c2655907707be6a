"""HTML that is escaped by construction: text becomes markup only through `element`."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

_VOID = {"meta", "input", "br", "col", "hr"}
# Marks that turn the direction of writing: text reads in the order in which it is written.
_TURNING = dict.fromkeys((0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | Markup | None | Iterable["Content"]


def element(tag: str, /, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """Return `<tag …>content</tag>`. Plain text and attribute values are escaped; `class_` is class, `data_x` is
    data-x; an attribute that is None or False is left out, one that is True stands alone."""
    opening = tag + "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{opening}>" if tag in _VOID else f"<{opening}>{join(*content)}</{tag}>")


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value).translate(_TURNING))}"'


def join(*content: Content) -> Markup:
    """Return the content one after the other; None is nothing."""
    parts: list[str] = []
    for part in content:
        if isinstance(part, Markup):
            parts.append(part)
        elif isinstance(part, str):
            parts.append(html.escape(part.translate(_TURNING)))
        elif part is not None:
            parts.append(join(*part))
    return Markup("".join(parts))


def data_block(name: str, data: Any) -> Markup:
    """Return a JSON document that no browser runs, with nothing in it that could end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_TURNING)
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{html.escape(name)}">{text}</script>')
