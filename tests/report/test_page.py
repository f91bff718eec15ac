"""Pages: they parse, need nothing else, and show the numbers they were given, or that there are none."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import advnorm
from advnorm.report import draw_figure, format_cell, render_page, to_rich_table
from support.page_reader import Reader

TABLE = {
    "title": "Accuracy (%)",
    "columns": [
        {"label": "model", "kind": "text"},
        {"label": "clean", "kind": "percent"},
        {"label": "gap", "kind": "points"},
    ],
    "rows": [["a <b> & c", 0.9312, -0.2051], ["d", None, None], ["e", 1.0, 0.00004]],
    "note": "a note",
}
BARS = {
    "kind": "bars",
    "title": "Bars",
    "series": ["clean", "weak", "strong"],
    "rows": [{"label": "a", "values": [0.9, 0.5, 0.1]}, {"label": "b", "values": [0.8, 0.4, None]}],
    "gap": (1, 2),
}
LINES = {
    "kind": "lines",
    "title": "Lines",
    "x": [1, 2, 3],
    "x_label": "epoch",
    "rows": [{"label": "a", "values": [0.0, 0.5, 1.0]}, {"label": "b", "values": [None, None, None]}],
    "note": "of lines",
}
PAGE = {
    "title": "A title",
    "about": "what it is",
    "lead": ["One sentence.", "Another <one>."],
    "tables": [TABLE],
    "figures": [BARS, LINES],
    "conditions": {"seed": 0, "commit": None},
    "commands": ["advnorm demo --seed 0"],
}


def elements(svg, tag, kind):
    return [e for e in ET.fromstring(svg).iter(tag) if kind in e.get("class", "").split()]


def test_a_page_parses_and_shows_its_content():
    text = Reader(render_page(PAGE)).text
    for piece in ("A title", "what it is", "One sentence.", "Another <one>.", "a <b> & c", "a note", "of lines"):
        assert piece in text
    for number in ("93.1", "−20.5", "100.0", "advnorm demo --seed 0"):
        assert number in text
    assert re.search(r"seed 0\b", text)


def test_a_page_refers_to_nothing_outside_itself():
    html = render_page(PAGE)
    reader = Reader(html)
    assert not {"script", "link", "img", "iframe", "base"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name in ("src", "href", "srcset", "xlink:href")]
    assert "://" not in html and "@import" not in html
    assert set(re.findall(r"url\((.*?)\)", html)) <= {"#hatch"}


def test_a_page_follows_light_and_dark_and_the_width_of_a_phone():
    html = render_page(PAGE)
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport" content="width=device-width' in html


def test_values_that_were_not_measured_are_shown_as_missing():
    html = render_page({"title": "t", "tables": [TABLE]})
    assert html.count("not run") == 2
    assert "b: not run" in draw_figure(LINES)
    assert "not run" in draw_figure(BARS)
    assert Reader(render_page({"title": "t", "conditions": {"commit": None}})).text.endswith("commit not run")


def test_a_page_may_have_only_a_title():
    html = render_page({"title": "Alone"})
    assert Reader(html).text == "Alone Alone"  # in the head and in the body
    assert not {"table", "svg", "pre", "dl"} & set(Reader(html).tags)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    rows=st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=20), *[st.floats(0, 1)] * 2
        ),
        max_size=6,
    )
)
def test_every_cell_is_shown_whatever_it_holds(rows):
    html = render_page({"title": "t", "tables": [{**TABLE, "rows": rows}]})
    Reader(html)
    cells = [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", html, re.S)]
    expected = [
        text
        for name, share, gap in rows
        for text in (name, f"{100 * share:.1f}", f"+{100 * gap:.1f}".replace("+0.0", "0.0"))
    ]
    assert cells == expected


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (None, "percent", "not run"),
        (0.279, "percent", "27.9"),
        (0.279, "points", "+27.9"),
        (-0.279, "points", "−27.9"),
        (-0.00001, "points", "0.0"),
        ("adv", "percent", "adv"),
        (3, "text", "3"),
    ],
)
def test_a_cell_as_text(value, kind, text):
    assert format_cell(value, kind) == text


def test_the_terminal_shows_the_same_table():
    from rich.console import Console

    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(to_rich_table({**TABLE, "note": "a note on data [a-z]"}))
    out = capture.get()
    for piece in ("Accuracy (%)", "a <b> & c", "93.1", "−20.5", "not run", "a note on data [a-z]"):
        assert piece in out


def test_the_terminal_shows_a_long_name_in_full():
    from rich.console import Console

    heading = "dual_bn, timm:a_network_with_a_long_name_patch16_224"
    console = Console(width=40, color_system=None)
    with console.capture() as capture:
        console.print(to_rich_table({**TABLE, "rows": [[heading], *TABLE["rows"]]}))
    lines = [line.split("│")[1].strip() for line in capture.get().splitlines() if line.startswith("│")]
    assert heading.replace(" ", "") in "".join(lines).replace(" ", "")


def test_bars_are_as_long_as_their_values_and_the_hatched_part_is_the_gap():
    svg = draw_figure(BARS)
    widths = [[float(bar.get("width")) for bar in elements(svg, "rect", f"b{place}")] for place in range(3)]
    full = widths[0][0] / 0.9
    assert widths[1] == pytest.approx([0.5 * full, 0.4 * full], abs=0.02)
    assert widths[2] == pytest.approx([0.1 * full, 0], abs=0.02)
    assert [float(bar.get("width")) for bar in elements(svg, "rect", "lost")] == pytest.approx([0.4 * full], abs=0.02)


def test_a_line_goes_through_its_values():
    (line,) = elements(draw_figure(LINES), "path", "line")
    x, y = zip(*(map(float, point.split()) for point in line.get("d").removeprefix("M").split("L")))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2) and x[0] < x[1]
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2) and y[0] > y[1]


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    values=st.lists(st.lists(st.floats(0, 1) | st.none(), min_size=3, max_size=3), min_size=1, max_size=4),
    names=st.booleans(),
)
def test_labels_of_lines_stand_apart_and_inside_the_figure(values, names):
    rows = [{"label": f"model {i}", "values": row} for i, row in enumerate(values)]
    svg = draw_figure({**LINES, "x": ["x", "y", "z"] if names else [1, 5, 9], "rows": rows})
    height = float(ET.fromstring(svg).get("viewBox").split()[3])
    at = sorted(float(text.get("y")) for text in ET.fromstring(svg).iter("text") if text.text.startswith("model"))
    assert len(at) == len(rows) and at[0] > 0 and at[-1] < height
    assert all(b - a >= 14.8 for a, b in pairwise(at))


def test_a_page_needs_no_torch():
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"  # importing it fails
        "package = types.ModuleType('advnorm')\n"  # the package itself imports torch
        f"package.__path__ = [{str(Path(advnorm.__file__).parent)!r}]\n"
        "sys.modules['advnorm'] = package\n"
        "from advnorm.report import render_page\n"
        f"print(render_page({PAGE!r}))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, encoding="utf-8")
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == render_page(PAGE).strip()
