"""The page in a real browser: Chromium of the system, headless and without a network. FTBENCH_SHOTS=DIR keeps the
pictures for a person to look at."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

from page_runs import HOSTILE, made, study  # noqa: E402

from ftbench.report.build import Request, report  # noqa: E402
from ftbench.store import rundir  # noqa: E402
from made_runs import RESULTS  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
]
DESKTOP, PHONE, PAPER = (1400, 900), (390, 844), (794, 1123)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    path = folder / "report.html"
    path.write_text(report(Request([study(folder / "runs")], "html")).text, "utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=90_000)
        yield found
        found.close()


@pytest.fixture(scope="module")
def crowded(tmp_path_factory) -> Path:
    """The page of a hundred specs of long names on two GPUs, and one of another model."""
    folder = tmp_path_factory.mktemp("crowded")
    for place in range(99):
        gpu = ("NVIDIA H200", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition")[place % 2]
        method = ("lora", "qlora", "full")[place % 3]
        batch, peak = 1 + place // 6, 5 + place * 7 % 60
        made(folder / "runs", method, batch, gpu=gpu, steps=12, speed=20 * batch / (peak + place % 9), peak=peak,
             name="a-name-of-an-experiment-that-somebody-chose")  # fmt: skip
    made(folder / "runs", "lora", 4, model="Qwen/Qwen3-0.6B", steps=12)
    path = folder / "report.html"
    path.write_text(report(Request([folder / "runs"], "html")).text, "utf-8")
    return path


@pytest.fixture(scope="module")
def diverse(tmp_path_factory) -> Path:
    """Write a page of seventy specs that all run out of memory."""
    folder = tmp_path_factory.mktemp("diverse")
    for number in range(70):
        run = made(
            folder / "runs",
            "lora",
            4,
            state="oom",
            reason="out of memory in forward of step 2, asked for beyond it by "
            + "abcdefghij"[number // 10]
            + "abcdefghij"[number % 10],
        )
        spec = rundir.read_json(run.spec_json)
        spec["train"]["learning_rate"] = (number + 1) / 1000
        rundir.write_json(run.spec_json, spec)
        run.summary.unlink()
    path = folder / "report.html"
    path.write_text(report(Request([folder / "runs"], "html")).text, "utf-8")
    return path


@pytest.fixture
def opened(browser, page_file):
    """Open a page, and check at the end for console output and network requests."""

    @contextmanager
    def open_(
        size: tuple[int, int] = DESKTOP, scheme: str = "light", file: Path = page_file, **more: Any
    ) -> Iterator[Any]:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, **more)
        page = context.new_page()
        page.set_default_timeout(90_000)  # milliseconds, that only a hang reaches
        said: list[str] = []
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url != file.as_uri() else None)
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]")
        yield page
        assert said == []
        context.close()

    return open_


def draw_all(page: Any) -> None:
    """Waits until each figure is drawn, in the room that it has."""
    for box in page.query_selector_all(".figure"):
        box.wait_for_selector("svg .line, .bar", state="attached")
    lay_out(page)


def lay_out(page: Any) -> None:
    """Wait for two frames, so that resized charts are redrawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def rows(page: Any, column: str | None = None) -> list[str]:
    """Return the visible cells of a column by heading, by default of the run column."""
    heads = [text.strip() for text in page.locator("#runs thead th").all_text_contents()]
    place = heads.index(column or "run id")
    return page.eval_on_selector_all(
        "#runs tbody tr:not([hidden])", f"rows => rows.map(row => row.cells[{place}].textContent)"
    )


def test_comparison_with_all_columns_fits_on_paper(opened, tmp_path):
    """Chromium shrinks content that is wider than the paper."""
    printed = 688  # pixels between the margins of A4
    page_file = tmp_path / "report.html"
    page_file.write_text(report(Request([RESULTS / "headline/full"], "html", "recipe")).text, "utf-8")
    with opened((printed, 1000), file=page_file) as page:
        page.emulate_media(media="print")
        lay_out(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 1.15 * printed


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "size"), [("desktop", DESKTOP), ("phone", PHONE), ("paper", PAPER)])
def test_page_draws_in_every_size_and_theme(opened, name, size, scheme, tmp_path):
    with opened(size, scheme) as page:
        draw_all(page)
        if name == "paper":
            page.emulate_media(media="print")
            lay_out(page)
        folder = Path(os.environ.get("FTBENCH_SHOTS", tmp_path))
        folder.mkdir(parents=True, exist_ok=True)
        picture = page.screenshot(path=folder / f"{name}-{scheme}.png", full_page=True)
        assert len(picture) > 20_000
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways"
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        dark = scheme == "dark" and name != "paper"
        assert background == ("rgb(18, 22, 27)" if dark else "rgb(255, 255, 255)")


def test_wide_table_scrolls_in_its_box(opened):
    with opened(PHONE) as page:
        assert page.eval_on_selector("#all-runs .scroll", "box => box.scrollWidth > box.clientWidth")
        assert page.eval_on_selector("#all-runs .scroll", "box => box.tabIndex") == 0


@pytest.mark.parametrize("size", [(1280, 800), PHONE])
def test_answer_chart_and_table_are_above_the_fold(opened, size, tmp_path):
    """A reader sees the answer, the chart and the first rows of the table without scrolling."""
    file = tmp_path / "report.html"
    file.write_text(report(Request([RESULTS / "headline/full"], "html")).text, "utf-8")
    with opened(size, file=file) as page:
        assert page.inner_text("h1") == "fastest-fp8 is the fastest of 7 recipes: 24,762 tokens/s"
        ends = "(each) => each.getBoundingClientRect().bottom"
        for part in ("h1", "#answer p", "#speeds", "#answer tbody tr:nth-child(3)"):
            assert 0 < page.eval_on_selector(part, ends) <= size[1], part
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "scrolls sideways"
        assert page.evaluate(CUT) == []
        assert not page.is_visible("#notes li"), "warnings are folded"
        assert page.locator("#losses").count() == 0, "random weights learn nothing"


def test_filters_combine_and_show_the_count(opened):
    with opened() as page:
        assert len(rows(page)) == 9
        page.fill("#filter", "QLORA h100")
        assert rows(page, "method") == ["qlora"]
        assert page.inner_text("#count") == "1 of 9 runs"
        page.fill("#filter", "")
        page.select_option("#state", "oom")
        assert rows(page, "method") == ["full"]
        page.fill("#filter", "nothing has this")
        assert rows(page) == []
        page.fill("#filter", "ERROR: window.stolen")
        page.select_option("#state", "")
        assert len(rows(page)) == 1


def test_headings_sort_by_mouse_and_keyboard_with_unknown_last(opened):
    with opened() as page:
        draw_all(page)  # a late chart would move the elements below the pointer
        page.locator("#runs").get_by_role("button", name="samples/h", exact=True).click()
        rising = rows(page, "samples/h")
        known = [float(text.replace(",", "")) for text in rising if text]
        assert known == sorted(known)
        assert rising[-2:] == ["", ""]
        head = page.locator("#runs").get_by_role("columnheader", name="samples/h")
        assert head.get_attribute("aria-sort") == "ascending"
        page.locator("#runs").get_by_role("button", name="samples/h", exact=True).focus()
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        falling = rows(page, "samples/h")
        assert [float(text.replace(",", "")) for text in falling if text] == sorted(known, reverse=True)
        assert falling[-2:] == ["", ""]
        assert page.locator("[aria-sort=ascending]").count() == 0


OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll(".figure > span, .legend > li, .bar > .name, .bar > .value, .bar > .track, .names li")]
    .filter((node) => node.checkVisibility()).map((node) => [node.textContent || "bar", node.getBoundingClientRect(), node.closest("section")]);
  const wrong = [];
  boxes.forEach(([text, a, section], i) => {
    const edge = section.getBoundingClientRect();
    if (a.left < edge.left - 1 || a.right > edge.right + 1) wrong.push(`cut: ${text}`);
    boxes.slice(i + 1).forEach(([other, b]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left), down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 3) wrong.push(`${text} over ${other}`);
    });
  });
  return wrong; }"""  # noqa: E501
CUT = """() => [...document.querySelectorAll("main *, footer *")].filter((node) => {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (!own || node.closest("svg, .scroll, select, .unseen") || !node.checkVisibility()) return false;
  const box = node.getBoundingClientRect();
  const hides = getComputedStyle(node).overflow !== "visible";
  return box.right > innerWidth + 1 || box.left < -1 || (hides && node.scrollWidth > node.clientWidth + 1);
}).map((node) => node.textContent)"""


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize("runs", ["page_file", "crowded"])
def test_no_text_overlaps_or_is_cut(opened, runs, size, scheme, request):
    with opened(size, scheme, request.getfixturevalue(runs)) as page:
        draw_all(page)
        assert page.evaluate(OVERLAPS) == []
        assert page.evaluate(CUT) == []


def test_long_run_table_shows_its_first_rows_and_a_button(opened, crowded, tmp_path):
    text = crowded.read_text("utf-8").replace("MOST_ROWS = 300", "MOST_ROWS = 40")
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (tmp_path / "page.html").write_text(re.sub(r"sha256-[^']+", f"sha256-{digest}", text, count=1), "utf-8")
    with opened(file=tmp_path / "page.html") as page:
        assert len(rows(page)) == 40
        page.click("#whole")
        assert len(rows(page)) == 100
        assert not page.is_visible("#whole")


def test_long_list_shows_its_first_entries_and_a_search(opened, diverse):
    with opened(file=diverse) as page:
        page.locator("#notes summary").first.click()
        entries = page.locator("#notes li:visible")
        assert entries.count() == 24
        page.locator("#notes input[type=search]").fill(" by gj")
        assert entries.count() == 1
        page.locator("#notes input[type=search]").fill("")
        page.locator("#notes").get_by_role("button", name="Show all 70").click()
        assert entries.count() == 70


def test_link_to_runs_filters_the_table(opened):
    with opened() as page:
        page.locator("#answer .evidence").first.click()
        shown = page.locator("#answer .evidence").first.get_attribute("data-runs").split()
        assert sorted(rows(page, "run")) == sorted(number for number in shown)
        page.locator("#filter").fill("")
        assert len(rows(page)) == 9


def test_markup_of_a_run_is_shown_as_text(opened):
    with opened() as page:
        page.fill("#filter", "error")
        assert HOSTILE[:20] in page.inner_text("#runs")
        assert page.evaluate("window.stolen") is None


def test_theme_switch_changes_page_and_charts(opened):
    with opened() as page:
        draw_all(page)
        paper = "() => getComputedStyle(document.querySelector('#speeds .fill')).backgroundColor"
        light = page.evaluate(paper)
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 27)"
        page.wait_for_function(f"before => ({paper})() !== before", arg=light)


def test_text_has_enough_contrast(opened):
    """Contrast of 4.5 to 1 between text and background (WCAG AA) in both themes."""
    script = """() => {
      const parse = (text) => text.match(/[\\d.]+/g).map(Number);
      const light = ([r, g, b]) => { const f = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
        return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
      const behind = (node) => { for (; node; node = node.parentElement) {
        const found = parse(getComputedStyle(node).backgroundColor);
        if (found.length < 4 || found[3] > 0) return found; }
        return [255, 255, 255]; };
      const faint = [];
      for (const node of document.querySelectorAll("main *, footer *, .theme")) {
        const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
        if (!own || !node.checkVisibility()) continue;
        const own_colour = getComputedStyle(node)[node.closest("svg") ? "fill" : "color"];
        const [a, b] = [light(parse(own_colour)), light(behind(node))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) faint.push(`${node.tagName}.${node.className}: ${ratio.toFixed(2)}`);
      }
      return faint; }"""
    for scheme in ("light", "dark"):
        with opened(scheme=scheme) as page:
            assert page.evaluate(script) == []


def test_tables_are_complete_without_scripts(browser, page_file):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert "JavaScript is off" in page.content()
    assert page.locator("#runs tbody tr").count() == 9
    context.close()


def test_print_contains_every_figure(browser, page_file, tmp_path):
    page = browser.new_page()
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-ready]")
    page.emulate_media(media="print")
    draw_all(page)
    page.pdf(path=tmp_path / "page.pdf", format="A4")
    assert (tmp_path / "page.pdf").stat().st_size > 20_000
    assert page.eval_on_selector_all(".figure > svg", "all => all.every(svg => svg.clientWidth <= 680)")
    page.close()


def test_costs_sort_by_amount(browser, tmp_path):
    for batch, speed in ((1, 0.5), (2, 0.2), (4, 3.0)):
        made(tmp_path / "runs", "lora", batch, steps=12, speed=speed)
    prices = tmp_path / "prices.yaml"
    prices.write_text("H200 SXM: {rent: {per_hour: 3.6, currency: USD, date: 2026-01-02, source: a shop}}\n")
    path = tmp_path / "report.html"
    path.write_text(report(Request([tmp_path / "runs"], "html", prices=prices)).text, "utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    page.get_by_role("button", name="1k samples", exact=True).click()
    place = page.locator("#runs thead th").all_inner_texts().index("1k samples")
    cells = [row.locator("td").nth(place).inner_text() for row in page.locator("#runs tbody tr").all()]
    shown = [float(text.split()[0]) for text in cells]
    assert shown == sorted(shown) == [pytest.approx(0.0996), 0.498, 0.747]
    page.close()
