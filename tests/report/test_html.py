"""The HTML page: self-contained, equal to the files, and safe against markup in names."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from page_runs import HOSTILE, JAPANESE, SECRET, made, study

from ftbench.errors import SpecError
from ftbench.report import formats
from ftbench.report import page as html
from ftbench.report.build import Request, report
from ftbench.report.data.collect import collect
from ftbench.report.document import ANSWER, Report, Section, Table
from ftbench.report.formats import render
from made_runs import RESULTS, make_run
from made_runs import steps as made_steps

ASSETS = Path(html.__file__).parent / "assets"


class Page(HTMLParser):
    """The elements of a page: tags with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.words: list[str] = []
        self.cells: list[list[str]] = []
        self._within: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._within = tag if tag in ("script", "style") else None
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._within = None

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self._within is None:
            self.words.append(data)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_TOKEN", SECRET)
        return report(Request([study(tmp_path_factory.mktemp("runs"))], "html")).text


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def test_page_fetches_nothing(page):
    """No element that loads, links or sends; the policy lets nothing through if there were one."""
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "form", "base", "img", "video", "audio"), tag
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy") or ""
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.partition("style-src")[0]


def test_policy_allows_only_the_script(page):
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy") or ""
    running = [script for attributes, script in page.scripts if "type" not in attributes]
    assert len(running) == 1
    assert f"'sha256-{base64.b64encode(hashlib.sha256(running[0].encode()).digest()).decode()}'" in policy


def test_page_of_many_committed_runs_is_small():
    text = report(Request([RESULTS / "grid"], "html")).text
    runs = text.count("<tr id=")
    assert runs > 50
    assert len(text.encode()) < 2_000 * runs


def test_run_texts_are_escaped(text, page):
    assert HOSTILE not in text
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert any("window.stolen=1" in word for word in page.words)  # shown, as words
    assert any(JAPANESE in word for word in page.words)


def test_names_cannot_change_the_writing_direction(text):
    assert "\u202e" not in text
    assert "abcgnp.exe" in text


def test_page_contains_no_paths_or_environment(text, tmp_path_factory):
    assert str(tmp_path_factory.getbasetemp()) not in text
    assert "SECRET_TOKEN" not in text


def test_title_names_the_fastest(page):
    words = " ".join(" ".join(page.words).split())
    assert "plain at batch 4 is the fastest of 3 recipes: 6,6" in words
    assert re.search(r"Left out: 5 runs \(1 out of memory, 1 failed, \d on other machines\)\.", words)


def test_every_run_has_a_sortable_row(page):
    rows = [attributes for tag, attributes in page.tags if tag == "tr" and "data-i" in attributes]
    assert len(rows) == 9
    assert sorted(row["data-s"] or "" for row in rows) == ["error", *["ok"] * 7, "oom"]
    heads = [attributes for tag, attributes in page.tags if tag == "th" and "aria-sort" in attributes]
    assert all(attributes["scope"] == "col" for attributes in heads)
    values = [float(a["data-v"] or "") for tag, a in page.tags if tag == "td" and "data-v" in a]
    assert any(value == pytest.approx(23_968, rel=1e-4) for value in values), "samples/h of plain at batch 4"


def test_models_are_not_ranked_together(tmp_path):
    made(tmp_path, "lora", 1, model="Qwen/Qwen3-0.6B", speed=0.01)
    made(tmp_path, "lora", 4)
    made(tmp_path, "qlora", 4, speed=0.8)
    page = Page(report(Request([tmp_path], "html")).text)
    words = " ".join(" ".join(page.words).split())
    assert re.search(r"Left out: 1 run of other models\. .* Other comparisons Qwen3-0.6B", words)
    assert [attributes.get("class") for tag, attributes in page.tags if tag == "div"].count("bar") == 2


def test_bars_link_to_their_runs(tmp_path):
    made(tmp_path, "lora", 4, peak=60)
    made(tmp_path, "qlora", 4, peak=9, speed=0.9)
    page = Page(report(Request([tmp_path], "html")).text)
    links = [
        attributes for tag, attributes in page.tags if tag == "a" and "evidence" in (attributes.get("class") or "")
    ]
    assert [link["data-runs"] for link in links] == ["1", "2"]


@pytest.mark.parametrize("learned", [True, False])
def test_loss_is_drawn_only_if_a_model_learned(tmp_path, learned):
    make_run(tmp_path, "a", made_steps(loss=lambda step: 3.0 - step / 20 if learned else 12.7 + 0.05 * (step % 3)))
    text = report(Request([tmp_path], "html")).text
    assert ('<path class="line"' in text) is learned


def test_style_sheet_has_no_broken_rules():
    """Browsers silently drop a rule whose selector contains a comment or another rule."""
    style = re.sub(r"/\*.*?\*/", "", (ASSETS / "report.css").read_text("utf-8"), flags=re.DOTALL)
    selectors = re.findall(r"([^{};]*)\{", style)
    assert [selector for selector in selectors if "@" in selector.strip()[1:]] == []


def test_different_numbers_of_gpus_are_not_compared(tmp_path):
    make_run(tmp_path, "one", made_steps(seconds=1.0))
    make_run(tmp_path, "two", made_steps(seconds=0.9), spec={"launch.gpus": 2, "launch.strategy": "ddp"})
    words = " ".join(" ".join(Page(report(Request([tmp_path], "html")).text).words).split())
    assert "is the only recipe" in words
    assert "1 run on another number of GPUs" in words


def test_page_of_failed_runs_works(tmp_path):
    made(tmp_path, "full", 8, state="oom", reason="out of memory")
    page = Page(render(Report(collect([tmp_path])), "html"))
    assert any("1 fine-tuning run without a valid speed" in word for word in page.words)


@pytest.mark.parametrize("content", ['"quoted" & more', "</td><script>"])
def test_markup_in_any_text_is_escaped(content, tmp_path):
    made(tmp_path, "lora", 4)
    table = Table({content: content}, [content, "GPU"], [[content, content]], [content])
    sections = [Section("energy", content, table, [content])]
    text = render(Report(collect([tmp_path]), sections=sections), "html")
    body = text.partition("<main>")[2].partition("</main>")[0]
    plain = Page(
        render(
            Report(collect([tmp_path]), sections=[Section("energy", "x", Table({}, ["x"], [["x"]], ["x"]), ["x"])]),
            "html",
        )
    )
    assert content not in body
    assert Page(text).words.count(content) == 6
    point = Section(ANSWER, content, None, [content])
    words = " ".join(Page(render(Report(collect([tmp_path]), sections=[point]), "html")).words)
    assert words.count(content) == 1
    assert {tag for tag, _ in Page(text).tags} <= {tag for tag, _ in plain.tags}


def test_unknown_file_suffixes_are_errors():
    with pytest.raises(SpecError, match=r"-o x.htlm: cannot write a report as"):
        formats.format_of(Path("x.htlm"))
    assert [formats.format_of(Path(other)) for other in ("x", "x.txt", "x.HTM", "/dev/stdout")] == [
        "table", "table", "html", "table"
    ]  # fmt: skip


def test_files_next_to_runs_are_ignored(tmp_path):
    made(tmp_path / "runs", "lora", 4)
    (tmp_path / "page.html").write_text("<p>")
    (tmp_path / "README.md").write_text("runs")
    assert len(collect(sorted(tmp_path.iterdir()))) == 1
    with pytest.raises(SpecError, match=r"page.html"):
        collect([tmp_path / "page.html"])
    with pytest.raises(SpecError, match="contains no run"):
        collect([tmp_path / "page.html", tmp_path / "README.md"])


def test_unwritable_output_is_an_error(tmp_path, ftbench):
    made(tmp_path / "runs", "lora", 4)
    code, _, err = ftbench("report", tmp_path / "runs", "-o", tmp_path / "no" / "x.md")
    assert code == 3
    assert "does not exist" in err
    assert err.count("\n") == 1


def test_assets_contain_no_urls():
    for path in ASSETS.iterdir():
        assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\(", path.read_text("utf-8")), path.name
