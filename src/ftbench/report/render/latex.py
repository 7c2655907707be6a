"""The comparison as a LaTeX table: booktabs, every character that LaTeX would act on escaped."""

import re
import unicodedata
from collections.abc import Iterable

from ftbench.report.render.document import Table

_LONG = 45  # rows that fit on a page; more become a longtable
_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\char34{}", "'": r"\textquotesingle{}", "`": r"\textasciigrave{}",
    "[": "{[}", "]": "{]}", "*": "{*}", "--": "-{}-",
    "…": r"\ldots{}", "·": r"\textperiodcentered{}", "×": r"\texttimes{}", "±": r"\textpm{}", "→": r"\textrightarrow{}",
    "≈": r"$\approx$", "≤": r"$\leq$", "≥": r"$\geq$", "°": r"\textdegree{}",
    "−": r"\textminus{}", "–": r"\textendash{}", "—": r"\textemdash{}", "\u00a0": "~",
}  # fmt: skip
_ACTIVE = re.compile("|".join(map(re.escape, _ESCAPES)))
_NEEDS = r"% needs \usepackage{booktabs,textcomp}"
_JAPANESE = r"% Japanese: compile with LuaLaTeX and \usepackage{luatexja-fontspec}"


def latex(table: Table, footnote: str = "") -> str:
    """Return a table, or a longtable where it would not fit on a page, with the shared context as caption and the
    footnote and notes below."""
    long = len(table.rows) > _LONG
    columns = "".join("l" if words else "r" for words in table.words)
    context = ", ".join(f"{key} {value}" for key, value in table.context.items())
    below = [text for text in (footnote, *table.notes) if text]
    notes = [rf"\par\noindent{{\footnotesize {escape(text)}}}" for text in below]
    head = [_row(rf"\textbf{{{escape(text)}}}" for text in table.headings), r"\midrule"]
    rows = [_row(map(escape, row)) for row in table.rows]
    lines = [_NEEDS.replace("booktabs", "booktabs,longtable") if long else _NEEDS, _JAPANESE]
    if long:
        caption = [rf"\caption{{{escape(context)}}} \\"] if context else []
        body = [rf"\begin{{longtable}}{{{columns}}}", *caption, r"\toprule", *head, r"\endhead"]
        lines += [*body, *rows, r"\bottomrule", r"\end{longtable}", *notes]
    else:
        caption = [rf"\caption{{{escape(context)}}}"] if context else []
        body = [r"\begin{table}", r"\centering", *caption, rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        lines += [*body, *head, *rows, r"\bottomrule", r"\end{tabular}", *notes, r"\end{table}"]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def escape(text: str) -> str:
    """Return text that LaTeX sets as it reads, on one line: `50 %_#` becomes `50 \\%\\_\\#`. Control characters and
    those that turn the direction of writing are left out."""
    one_line = " ".join(str(text).split())
    visible = "".join(c for c in one_line if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn"))
    return _ACTIVE.sub(lambda match: _ESCAPES[match[0]], visible)
