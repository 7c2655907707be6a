"""The page's sections: each a function data → markup. What needs a figure holds an empty box that the script fills."""

from __future__ import annotations

from collections.abc import Sequence

from ftbench.core import units
from ftbench.report.data.axes import in_order
from ftbench.report.data.collect import Record
from ftbench.report.data.groups import PEAK, SAMPLES, Cell
from ftbench.report.page.markup import Content, Markup, element, join
from ftbench.report.page.view import RunRow, View
from ftbench.report.render.document import Section, Table
from ftbench.report.render.runs_table import CONTEXT, FOOTNOTE

_MOST_GRIDS = 24
_FOLDED, _WHOLE = 16, 80  # rows of a table that are shown without being asked for
TEXT_HEADINGS = (*CONTEXT.values(), "method", "state", "where it fails", "note")
_SHORT = 24  # a text of more characters may be broken in its cell


def section(name: str, heading: str, *content: Content) -> Markup:
    return element("section", element("h2", heading), *content, id=name, aria_label=heading)


# --- the runs --------------------------------------------------------------------------------------------------------


def runs(view: View) -> Markup:
    """Return the sortable, filterable table: a row a run, with a button that opens its details."""
    states = list(dict.fromkeys(row.state for row in view.rows))
    tools = element(
        "div",
        element("label", "Filter ", element("input", type="search", id="filter", placeholder="lora, H100, oom …")),
        element("label", "State ", element("select", element("option", "all", value=""),
                [element("option", state, value=state) for state in states], id="state")),
        element("output", f"{len(view.rows)} runs", id="count", aria_live="polite"),
        class_="tools",
    )  # fmt: skip
    heads = [
        element("th", element("button", heading, type="button"), scope="col", aria_sort="none",
                class_=None if _is_text(view, i) else "n")
        for i, heading in enumerate(view.headings)
    ]  # fmt: skip
    opener = element("th", "details", scope="col")
    name = element("th", element("button", "run", type="button"), scope="col", aria_sort="none")
    table = element(
        "table",
        element("caption", "Click a heading to sort. “Show” opens a run's figures, what was applied, its warnings."),
        element("thead", element("tr", opener, *heads, name)),
        element("tbody", [_row(view, number, row) for number, row in enumerate(view.rows)]),
        id="runs",
    )  # fmt: skip
    box = element("div", table, class_="scroll", tabindex="0", role="region", aria_label="All runs, scrolls sideways")
    return section("all-runs", "All runs", tools, box, element("p", FOOTNOTE, class_="quiet"))


def _is_text(view: View, column: int) -> bool:
    return all(row.order[column] is None for row in view.rows)


def _row(view: View, number: int, row: RunRow) -> Markup:
    button = element("button", "show", type="button", class_="open", aria_label=f"Show {row.run_id}")
    cells = [element("td", button)]
    for heading, text, order in zip(view.headings, row.texts, row.order, strict=True):
        if heading == "state":
            cells.append(element("td", badge(row.state, text), class_="words"))
        elif order is None:
            cells.append(element("td", text, class_="words" if len(text) > _SHORT else None))
        else:
            cells.append(element("td", text, class_="n", data_v=f"{order:.9g}"))
    warned = element("span", "!", title="carries a warning", role="img", aria_label="carries a warning",
                     class_="mark") if row.record["warnings"] else None  # fmt: skip
    return element("tr", *cells, element("td", warned, row.run_id), data_i=number, data_s=row.state)


def badge(state: str, text: str) -> Markup:
    """Return a state in words; the colour only repeats it."""
    kind = "good" if state == "ok" else "bad" if state in ("oom", "error", "timeout") else "weak"
    return element("span", text, class_=f"badge {kind}")


# --- the out-of-memory frontier --------------------------------------------------------------------------------------


def frontier(view: View) -> Markup | None:
    """Return ways of training × batch, a grid for each workload and GPU on which something was tried at several
    batches; None where nothing was."""
    grids: dict[tuple[str, str], list[Cell]] = {}
    for workload in view.workloads:
        for cell in view.cells_of(workload):
            grids.setdefault((workload, cell.facts["gpu"]), []).append(cell)
    worth = {workload: cells for workload, cells in grids.items() if len({cell.batch for cell in cells}) > 1}
    if not worth:
        return None
    shown = [_grid(workload, cells) for workload, cells in list(worth.items())[:_MOST_GRIDS]]
    more = f"{len(worth) - _MOST_GRIDS} more grids are left out." if len(worth) > _MOST_GRIDS else None
    key = "GiB of tensors at the highest peak of the runs that ended well; below it samples per hour (mean of repeats)."
    return section("frontier", "What fits", *shown, element("p", key, class_="quiet"), more)


def _grid(workload: tuple[str, str], cells: Sequence[Cell]) -> Markup:
    """Return a row for each way of training, with a place for each batch: one spec each."""
    lines: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        lines.setdefault(cell.way, {})[cell.batch] = cell
    batches = in_order("train.batch_size", (cell.batch for cell in cells))
    head = element("tr", element("th", "trained by", scope="col"), [
        element("th", f"batch {batch}", scope="col") for batch in batches
    ])  # fmt: skip
    rows = [
        element("tr", element("th", way, scope="row"), [_cell(line.get(batch)) for batch in batches])
        for way, line in lines.items()
    ]
    caption = element("caption", " · ".join([workload[0], workload[1]]))
    table = element("table", caption, element("thead", head), element("tbody", rows), class_="grid")
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label="What fits, scrolls sideways")


def _cell(cell: Cell | None) -> Markup:
    if cell is None:
        return element("td", element("span", "not tried", class_="quiet"), class_="none")
    failed = [run for run in cell.runs if not run.ok]
    if not cell.ok:
        states = dict.fromkeys(str(run.record["state"]) for run in failed)
        words = " / ".join("out of memory" if state == "oom" else state for state in states)
        kind = "oom" if "oom" in states else "weak"
        return element("td", element("b", words), element("span", _where_it_failed(failed[0].record)), class_=kind)
    count = f" ({len(cell.ok)} of {len(cell.runs)})" if failed else ""
    peaks, rate = cell.values(PEAK), cell.figure(SAMPLES)
    figure = f"{units.gibibytes(max(peaks))} GiB" if peaks else "fits"
    speed = element("span", f"{units.rate(rate * 3600)} /h") if rate else None
    return element("td", element("b", figure, count), speed, class_="some" if failed else "fits")


def _where_it_failed(record: Record) -> str:
    phase, step, reason = record.get("oom.phase"), record.get("oom.step"), record.get("reason")
    if isinstance(phase, str) and isinstance(step, (int, float)):
        return f"{phase}, step {step:.0f}"
    return reason[:40] if record["state"] != "oom" and isinstance(reason, str) else ""


# --- figures ---------------------------------------------------------------------------------------------------------


def speed(view: View) -> Markup | None:
    """Return boxes for the bars and for speed against memory; left out where no run has a speed."""
    if not any("samples" in row.values for row in view.rows):
        return None
    workloads = view.workloads  # the first is shown first: that of most runs
    choice = _select("workload", "Workload", [(name, name) for name in workloads]) if len(workloads) > 1 else None
    metric = _select("metric", "Figure", [
        ("samples", "samples per hour"), ("step", "median step"), ("tokens", "real tokens per second"),
        ("peak", "GiB of tensors at the peak"), ("energy", "joules per 1,000 samples (GPU only)"),
    ])  # fmt: skip
    return element(
        "div",
        section(
            "pareto", "Speed against memory", element("div", choice, class_="tools"),
            _box("pareto-figure", "Samples per hour against GiB of tensors at the peak, a point a run"),
            element("p", "Up and to the left is better. The line joins the runs that no other run beats in both. "
                    "Runs that failed have no point.", class_="quiet"),
        ),
        section(
            "bars", "Comparison", element("div", metric, class_="tools"),
            _box("bars-figure", "One bar for each spec and GPU"),
            element("p", "Whiskers are 95 % intervals. Repeats of one spec: their mean, Student's t over the runs. One "
                    "run: the interval of its median step, widened by what like runs differ by. "
                    "No whisker: too few steps for an interval, or a figure that has none (memory, energy of one run).",
                    class_="quiet"),
        ),
        class_="pair",
    )  # fmt: skip


def curves(view: View, points: int | None) -> Markup:
    """Return the box for the curves, and what may be drawn in it."""
    tools = element(
        "div",
        _select("curve", "Curve", [
            ("memory", "memory: allocated, reserved, peak"), ("step", "step time"), ("loss", "training loss"),
            ("elapsed", "elapsed time"),
        ]),
        _select("along", "along", [("progress", "progress"), ("step", "steps")]),
        class_="tools",
    )  # fmt: skip
    pick = element(
        "details",
        element("summary", "Choose runs ", element("span", "", id="picked")),
        element("label", "Filter ", element("input", type="search", id="pick-filter")),
        element("div", id="pick", class_="pick", role="group", aria_label="Runs to draw"),
        class_="chooser",
    )
    downsampled = (
        f"Curves of more than {points} steps are reduced to {points} points: of each stretch the lowest and the "
        "highest value are drawn, the first and the last too, and nothing between is invented."
        if points else "Every recorded step is drawn."
    )  # fmt: skip
    return section(
        "curves", "Over the run", tools, pick, _box("curves-figure", "The curve chosen above, a line a run"),
        element("p", f"Memory is GiB: allocated and reserved at the end of each step, peak within it. {downsampled}",
                class_="quiet"),
    )  # fmt: skip


def _select(name: str, label: str, options: Sequence[tuple[str, str]]) -> Markup:
    choices = [element("option", text, value=value) for value, text in options]
    return element("label", f"{label} ", element("select", choices, id=name))


def _box(name: str, label: str) -> Markup:
    return element("div", id=name, class_="figure", role="img", aria_label=label)


# --- text ------------------------------------------------------------------------------------------------------------


def notes(view: View) -> Markup | None:
    """Return warnings and reasons, each once with the runs that it is about."""
    if not view.notes:
        return None
    listed = element("ul", [element("li", note) for note in view.notes])
    return section("notes", "Warnings and reasons", listed)


def answer(part: Section, whole: bool = False) -> Markup | None:
    """Return any other part of the report: its words and its table with the notes; a long table is folded away, unless
    it is to be shown whole."""
    words = [element("p", text) for text in part.paragraphs]
    shown = table(part.title, part.table) if part.table and part.table.rows else None
    if not words and not shown:
        return None
    rows = len(part.table.rows) if part.table else 0
    if shown and rows > (_WHOLE if whole else _FOLDED):
        shown = element("details", element("summary", f"{rows} rows"), shown, class_="chooser")
    pictures = [element("div", Markup(picture), class_="picture") for picture in part.pictures]
    return section(f"answer-{part.key}", part.title, words, shown, pictures)


def table(title: str, shown: Table) -> Markup:
    """Return a comparison with its context as caption, and its notes below."""
    left = [heading in (*TEXT_HEADINGS, *shown.text) for heading in shown.headings]
    head = element("tr", [
        element("th", text, scope="col", class_=None if is_left else "n")
        for text, is_left in zip(shown.headings, left, strict=True)
    ])  # fmt: skip
    rows = [
        element("tr", [
            element("td", text, class_=("words" if len(text) > _SHORT else None) if is_left else "n")
            for text, is_left in zip(row, left, strict=True)
        ])
        for row in shown.rows
    ]  # fmt: skip
    context = " · ".join(f"{key} {value}" for key, value in shown.context.items())
    inner = element(
        "table",
        element("caption", context or title, class_=None if context else "unseen"),
        element("thead", head),
        element("tbody", rows),
    )
    below = [element("p", note, class_="quiet") for note in shown.notes]
    box = element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=f"{title}, scrolls sideways")
    return join(box, *below)
