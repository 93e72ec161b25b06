"""The report is one well-formed page that holds every part and asks nobody for anything."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kvferry.cluster.loadgen.errors import BadLoad
from kvferry.cluster.loadgen.experiments.arrangements import parse_arrangements
from kvferry.cluster.loadgen.experiments.recipes import RECIPES
from kvferry.cluster.loadgen.experiments.sweep_making import make_sweep
from kvferry.cluster.loadgen.experiments.sweep_plan import Axis, Sweep
from kvferry.cluster.loadgen.report.chart import Chart, Line, ticks
from kvferry.cluster.loadgen.report.curves import all_charts
from kvferry.cluster.loadgen.report.page import report
from kvferry.cluster.loadgen.report.png import PlotsMissing, write_pngs
from kvferry.cluster.loadgen.report.svg import draw
from kvferry.cluster.loadgen.settings import Settings
from tests.loadgen.experiments.making import repeat, run_document
from tests.loadgen.experiments.sweeps import FakeClusters, sweep_document
from tests.loadgen.report.chromium import open_page

VOID = {"meta", "link", "br", "hr", "img", "input"}
URLS = ("href", "src", "action", "data", "poster", "srcset", "xlink:href", "background")


class Page(HTMLParser):
    """Reads a page strictly: every element is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.urls: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = dict(attrs)
        assert len(named) == len(attrs), f"an attribute of {tag} stands twice"
        assert not any(name.startswith("on") for name in named), named
        self.ids += [named["id"] or ""] if "id" in named else []
        self.urls += [named[name] or "" for name in URLS if name in named]
        self.urls += re.findall(r"url\(([^)]*)\)", named.get("style") or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open[-1:] == ["style"]:
            self.urls += re.findall(r"url\(([^)]*)\)", data) + re.findall(r"@import\s+(\S+)", data)


def sweep() -> Sweep:
    return Sweep(
        parse_arrangements("1x2,2x1,1P+1D"),
        Settings(repeats=3, num_requests=3, slo_ttft=1.0),
        Axis("rate", (1, 2)),
    )


COMMON = {"figures", "latency", "parts", "server", "ends", "origin", "again"}
SECTIONS = {
    "a run": set[str](),
    "a sweep": {"goodput", "verdict"},
    "mixed-lengths": {"goodput", "verdict"},
    "prefixes": {"goodput", "contrasts"},
    "pressure": {"contrasts", "verdict", "drains"},
    "disaggregation": {"goodput", "verdict"},
}


def document_of(name: str) -> dict[str, Any]:
    if name == "a run":
        return run_document([repeat(1), repeat(2)], config=Settings().to_json())
    return sweep_document(make_sweep({"repeats": 2}, RECIPES[name]) if name in RECIPES else sweep())


@pytest.mark.parametrize("name", SECTIONS)
def test_a_page_is_well_formed_and_whole_and_alone(name: str) -> None:
    document = document_of(name)
    text = report(document)
    page = Page(text)
    assert set(page.ids) == COMMON | SECTIONS[name]
    assert len(page.ids) == len(set(page.ids))
    assert "script" not in page.tags
    assert {urlsplit(url).scheme for url in page.urls} <= {"data"}, page.urls
    assert not re.search(r"https?://", text.replace(str(document["command"]), ""))
    assert "default-src 'none'" in text
    assert page.tags.count("svg") == len(all_charts(document))
    whole = " ".join(page.text)
    for said in (document["commit"], document["command"], "a processor", "To repeat it"):
        assert said in whole


def test_text_from_outside_stays_text() -> None:
    evil = "<script>alert(1)</script>\"'&"
    document = sweep_document(sweep())
    document["command"] = evil
    document["points"][0] = {**document["points"][0], "ok": False, "label": evil}
    document["points"][0]["error"] = {"code": "INTERNAL", "type": "X", "message": evil}
    document["verdicts"][0]["words"] = evil
    for point in document["points"]:
        point["run"]["repeats"][0]["failures"] = {evil: 1}
    page = Page(report(document))
    assert "script" not in page.tags
    assert " ".join(page.text).count("<script>alert(1)</script>") >= 4


def test_a_document_without_figures_is_a_page() -> None:
    assert "Nothing was measured" in report(run_document([], config=Settings().to_json()))
    empty = sweep_document(sweep())
    empty |= {"points": [], "summary": [], "verdicts": []}
    assert "Nothing was measured" in report(empty)
    failed: dict[str, Any] = {**run_document([]), "repeats": None, "config": None}
    Page(report(failed))
    with pytest.raises(BadLoad, match=r"schema: got 'kvferry\.demo/1'"):
        report({"schema": "kvferry.demo/1"})


def test_what_a_server_does_not_tell_is_left_out() -> None:
    told = repeat(1)
    told["server"] = None
    told["parts"] = dict.fromkeys(told["parts"])
    page = Page(report(run_document([told], config=Settings().to_json())))
    assert {"server", "parts"}.isdisjoint(page.ids)


def test_a_verdict_is_on_the_page() -> None:
    figures = {"1P+1D": 0.5, "1x2": 2.0, "2x1": 1.0}
    clusters = FakeClusters(goodput=lambda name, number: figures[name] + number / 100)
    words = " ".join(Page(report(sweep_document(sweep(), clusters))).text)
    assert "Do not disaggregate: 1P+1D serves less within the SLO" in words


numbers = st.floats(-1e6, 1e6, allow_nan=False, width=32)
positive = st.floats(0, 1e6, allow_nan=False, width=32)
lines = st.builds(
    Line,
    name=st.text(max_size=12),
    points=st.lists(st.tuples(numbers, positive), max_size=5).map(tuple),
    colour=st.integers(0, 20),
    is_dashed=st.booleans(),
    has_marks=st.booleans(),
)


@given(st.lists(lines, max_size=4), st.text(max_size=12))
def test_any_chart_is_drawn_inside_its_frame(drawn: list[Line], title: str) -> None:
    text = draw(Chart("c", title.replace("\0", ""), "x", "y", tuple(drawn)))
    Page(text.replace("\0", ""))
    for pair in re.findall(r'points="([^"]*)"', text):
        for point in pair.split():
            x, y = map(float, point.split(","))
            assert 61 <= x <= 547 and 33 <= y <= 283


@given(st.floats(-1e6, 1e6), st.floats(0.001, 1e6))
def test_ticks_are_few_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    slack = width * 1e-6 + abs(low) * 1e-9
    assert all(low - slack <= tick <= low + width + slack for tick in found)
    assert len(found) <= 8


def test_intervals_of_few_repeats_do_not_hide_the_rest() -> None:
    line = Line("a", ((1.0, 2.0),), intervals=((-90.0, 100.0),))
    chart = Chart("c", "t", "x", "y", (line,))
    assert chart.spans()[2] == 4.0
    (low, high) = re.findall(r'd="M[0-9.]+ ([0-9.]+)V([0-9.]+)m', draw(chart))[0]
    assert (float(low), float(high)) == (282.0, 34.0)  # the frame's ends


def test_plots_are_pictures(tmp_path: Path) -> None:
    charts = all_charts(sweep_document(sweep()))
    names = {chart.name for chart in charts}
    assert {"goodput", "ttft-rate-1", "itl-rate-2", "e2e-rate-2", "kv-over-time-rate-1"} <= names
    assert len(names) == len(charts)
    written = write_pngs(charts[:3], tmp_path / "plots")
    for path in written:
        assert_not_blank(path)


def test_without_matplotlib_it_is_said_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotsMissing, match=re.escape("pip install 'kvferry[plots]'")):
        write_pngs([], tmp_path)


def test_chromium_shows_the_page_and_has_no_complaint(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report(sweep_document(sweep())), encoding="utf-8")
    opened = open_page(path, tmp_path)
    assert opened.console == []
    assert_not_blank(opened.screenshot)
    with Image.open(opened.screenshot) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)} <= colours  # the curves


def test_a_complaint_of_chromium_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    bad = '<img src="http://127.0.0.1:9/x.png"></body>'
    text = report(sweep_document(sweep()))
    path.write_text(text.replace("</body>", bad), encoding="utf-8")
    assert open_page(path, tmp_path).console != []


def assert_not_blank(path: Path) -> None:
    with Image.open(path) as image:
        found = image.convert("L").getextrema()
        assert image.width > 300 and image.height > 200
    assert found[0] < 100 and found[1] > 200, found  # type: ignore[operator]
