"""The page of studies: verdicts, numbers, what is missing, conditions; alone in one file and alive in a browser."""

import copy
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import advnorm
from advnorm._core.errors import ConfigError
from advnorm.report import draw_figure, render_studies_page
from advnorm.report.results import missing_cells, results_markdown
from advnorm.report.studies import MOST_ENTRIES, count_verdicts, format_cost
from support.command import invoke
from support.page_reader import Reader
from support.problems import raises_problem

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def entry(row, column, cell, paper, ours, spread=None, n=0):
    difference = None if paper is None or ours is None else ours - paper
    keys = {"row": row, "column": column, "cell": cell, "value": f"adv/{column}", "paper": paper, "ours": ours}
    interval = None if ours is None or paper is None else (ours - 1, ours + 1)
    return {**keys, "interval": interval, "images": 10_000, "spread": spread, "n": n, "difference": difference}


def cell(name, seeds, minutes, **settings):
    return {
        "name": name,
        "seeds": seeds,
        "measured_for": ["A/table3"] if name.startswith("dual_bn") else [],
        "devices": ["NVIDIA H200"] if seeds else [],
        "minutes": minutes,
        "settings": settings,
    }


def result(**changes):
    return {
        "protocol": None,
        "verdict": "not run",
        "needs": "",
        "networks": 0,
        "without_outcomes": 0,
        "clauses": [],
        "entries": [],
        "series": [],
        "cells": [],
        "settings": {"epochs": "30", "data": "cifar10"},
        "outdated": [],
        "minutes": {},
        "measures": [],
        "torch": [],
        "precision": [],
        "commits": [],
        **changes,
    }


def study(name, results, **more):
    texts = {"caption": f"caption of {name}", "where": "section 3", "claim": f"claim <of> {name}", "notes": "a note"}
    about = {"deviations": [f"{name} <deviates>."], "print_fails": ["even <print> fails"]}
    return {"name": name, "printed": {**texts, **more}, **about, "results": results}


DONE = result(
    protocol="fast",
    verdict="supported",
    entries=[
        entry("Dual BN", "clean", "dual_bn/eps16", 61.84, 60.5, 0.75, 3),
        entry("Dual BN", "autoattack", "dual_bn/eps16", None, 21.0, None, 1),
        entry("Cross <BN>", "clean", "cross_bn/eps16", 59.56, None),
    ],
    cells=[cell("dual_bn/eps16", [0, 1, 2], 12.34, norm="dual_bn"), cell("cross_bn/eps16", [], None, norm="cross_bn")],
    minutes={"NVIDIA H200": 12.34},
    measures=["benchmark (pgd10-step2, autoattack) on all images"],
    torch=["2.11.0"],
    precision=["bf16"],
    commits=[COMMIT],
)
CURVES = result(
    protocol="paper",
    verdict="contradicted",
    networks=1,
    without_outcomes=1,
    clauses=[
        ("the loss <falls>: 3 and 1", False, "contradicted", "far: by 3 (our margin: <none>)", False),
        ("it is finite", True, "supported", "", False),
    ],
    entries=[entry("bn", f"v{i}", "bn", None, 0.00012, None, 1) for i in range(MOST_ENTRIES + 5)],
    series=[{"cell": "bn", "value": "loss", "over": "epoch", "x": [1, 2, 3], "ours": [-1.0, 250.0, 3.0]}],
    cells=[cell("bn", [0], 1.0)],
    minutes={"cpu": 1.0},
)
OPEN = result(entries=[entry("LN", "clean", "ln", 75.12, None)], cells=[cell("ln", [], None)])
SUMMARY = {
    "papers": {"A": "A title", "D": "Another"},
    "studies": [
        study("A/table2", [DONE]),
        study("A/table4", [OPEN]),
        study("D/fig4", [CURVES], printed=[{"what": "LIGS, close to", "value": 1}]),
    ],
    "minutes": {"NVIDIA H200": 12.34, "cpu": 1.0},
    "networks": 4,
    "problems": ["records/x.json is skipped: it is <damaged>"],
    "others": {"bench": 5},
    "definitions": {"near": "within <3> points", "far": "beyond"},
}


def section(html, anchor):
    """The part of the page that shows one study."""
    return re.search(rf'<details class="study" id="{anchor}".*?(?=<details class="study"|</section>)', html, re.S)[0]


def rows(html):
    """The text of every table row."""
    found = re.findall(r"<tr>(.*?)</tr>", html, re.S)
    return [[unescape(text) for text in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S)] for row in found]


def test_the_clauses_of_a_claim_are_listed_and_failures_marked():
    text = Reader(section(render_studies_page(SUMMARY), "D-fig4")).text
    assert "✗ fails: the loss <falls>: 3 and 1 ✓ it is finite" in text
    assert "not so" not in Reader(section(render_studies_page(SUMMARY), "A-table2")).text


def test_the_overview_has_every_study_with_its_verdict_protocol_and_claim():
    text = Reader(render_studies_page(SUMMARY)).text
    assert "A: A title" in text and "D: Another" in text
    assert "A/table2 ✓ supported protocol fast, 1 of 2 cells, 3 seeds claim <of> A/table2" in text
    assert "(97.5 % of resampled numbers). In a claim, near is within <3> points, far is beyond, unless" in text
    assert "A/table4 ○ not run claim <of> A/table4" in text
    assert (
        "D/fig4 ✗ contradicted protocol paper, 1 of 1 cells, 1 seed, 1 independent network "
        "claim <of> D/fig4 paper, fails: the loss" in text
    )
    assert "✓ 1 supported ✗ 1 contradicted ◐ 0 undecided ○ 1 not run" in text
    assert "Training took 12.3 GPU minutes (NVIDIA H200), 1.0 CPU minutes" in text


def test_the_table_shows_paper_ours_with_spread_and_n_and_the_difference():
    found = rows(section(render_studies_page(SUMMARY), "A-table2"))
    assert ["", "paper", "ours", "n", "difference"] in found
    assert ["clean", "61.84", "60.50 (59.50–61.50) ± 0.75", "3", "−1.34"] in found
    assert ["autoattack", "–", "21.00", "1", "–"] in found
    assert ["Dual BN"] in found and ["Cross <BN>"] in found


def test_what_was_not_run_is_shown_as_missing():
    html = render_studies_page(SUMMARY)
    assert ["clean", "59.56", "not run", "0", "–"] in rows(section(html, "A-table2"))
    assert ["cross_bn/eps16", "norm cross_bn", "not run", "not run"] in rows(section(html, "A-table2"))
    assert ["clean", "75.12", "not run", "0", "–"] in rows(section(html, "A-table4"))
    assert "not run" in re.findall(r'class="row".*?</g>', section(html, "A-table2"), re.S)[-1]
    assert "<svg" not in section(html, "A-table4")  # nothing to compare


def test_conditions_cost_and_settings_stand_beside_the_numbers():
    text = Reader(section(render_studies_page(SUMMARY), "A-table2")).text
    for piece in (
        "Protocol fast: a shortened schedule",
        "12.3 GPU minutes (NVIDIA H200)",
        "measured benchmark (pgd10-step2, autoattack) on all images",
        "dual_bn/eps16 (for A/table3)",
        "hardware NVIDIA H200",
        "precision bf16",
        "torch 2.11.0",
        f"commit {COMMIT}",
        "norm dual_bn",
        "epochs 30",
        "a note",
    ):
        assert piece in text, piece


def test_outdated_records_are_named_beside_their_numbers():
    outdated = {**DONE, "outdated": ["dual_bn/eps16 seed 0", "dual_bn/eps16 seed 2"]}
    text = Reader(render_studies_page({**SUMMARY, "studies": [study("A/table2", [outdated])]})).text
    assert "outdated records dual_bn/eps16 seed 0, dual_bn/eps16 seed 2" in text
    assert "of other settings" not in Reader(render_studies_page(SUMMARY)).text


def test_pointing_at_a_number_of_the_figure_shows_its_conditions():
    html = section(render_studies_page(SUMMARY), "A-table2")
    hints = [unescape(hint) for hint in re.findall(r'<g class="row" tabindex="0"><title>(.*?)</title>', html)]
    assert hints[0] == (
        "Dual BN, clean: paper 61.84, ours 60.50 (59.50–61.50) ± 0.75 · n = 3, protocol fast, seeds 0, 1, 2 · "
        "NVIDIA H200 · cell dual_bn/eps16 · value adv/clean"
    )
    assert hints[2] == "Cross <BN>, clean: paper 59.56, ours not run · cell cross_bn/eps16 · value adv/clean"


def test_a_figure_without_printed_numbers_shows_ours_alone_as_table_and_lines():
    html = section(render_studies_page(SUMMARY), "D-fig4")
    assert ["v0", "0.00012", "1"] in rows(html) and ["", "ours", "n"] in rows(html)
    assert "5 more measured numbers and lines are in the records" in html
    assert "LIGS, close to: 1" in html and 'class="line s0"' in html


def test_lines_whose_names_differ_in_one_part_share_a_figure():
    names = [
        "affine/AP_clean/weight",
        "affine/AP_adv/weight",
        "affine/AP_clean/bias",
        "loss",
        "before/fog",
        "after/fog",
    ]
    series = [
        {"cell": "bn", "value": name, "over": "channel", "x": [1, 2, 3], "ours": [1.0, 2.0, 3.0]} for name in names
    ]
    html = render_studies_page({**SUMMARY, "studies": [study("A/fig5", [{**CURVES, "series": series}])]})
    figures = [part.partition("</figure")[0] for part in section(html, "A-fig5").split("<figure")[1:]]
    titles = ["affine/weight", "affine/bias", "loss", "A/fig5: fog"]
    assert [title in figure for title, figure in zip(titles, figures, strict=True)] == [True] * 4
    assert ["AP_clean" in figure for figure in figures] == [True, True, False, False]
    assert ["AP_adv" in figure for figure in figures] == [True, False, False, False]
    assert ["before" in figure and "after" in figure for figure in figures] == [False, False, False, True]


def test_a_line_has_one_colour_in_every_figure_of_a_study():
    names = ["near/AP/total", "near/NS/total", "far/NS/total", "far/AP/total", "far/AP/mean"]
    series = [{"cell": "bn", "value": name, "over": "layer", "x": [1, 2, 3], "ours": [1.0, 2.0, 3.0]} for name in names]
    html = render_studies_page({**SUMMARY, "studies": [study("A/fig6", [{**CURVES, "series": series}])]})
    figures = [part.partition("</figure")[0] for part in section(html, "A-fig6").split("<figure")[1:]]
    colours = [re.findall(r'class="line (s\d)"', figure) for figure in figures]
    assert colours == [["s0", "s1"], ["s1", "s0"], ["s0"]]


def test_cells_measured_for_other_studies_are_explained_where_there_are_any():
    (one,) = (item for item in SUMMARY["studies"] if item["name"] == "D/fig4")
    text = "For: the study that it was measured for."
    for name, shown in (("bn", False), ("dual_bn", True)):
        cells = [cell(name, [0], 1.0)]
        html = render_studies_page({**SUMMARY, "studies": [{**one, "results": [{**CURVES, "cells": cells}]}]})
        assert (text in html) is shown


def test_problems_are_listed_and_other_folders_named():
    text = Reader(render_studies_page(SUMMARY)).text
    assert "1 problem with records." in text
    assert "records/x.json is skipped: it is <damaged>" in text and "bench (5)" in text
    assert 'id="problems"' not in render_studies_page({**SUMMARY, "problems": [], "others": {}})


def test_the_page_refers_to_nothing_outside_itself():
    html = render_studies_page(SUMMARY)
    reader = Reader(html)
    assert not {"link", "img", "iframe", "base"} & set(reader.tags)
    assert not [value for name, value in reader.attributes if name in ("src", "srcset", "xlink:href", "action")]
    targets = [value for name, value in reader.attributes if name == "href"]
    assert targets and {target[0] for target in targets} == {"#"}
    assert {target[1:] for target in targets} <= {value for name, value in reader.attributes if name == "id"}
    assert "://" not in html and "@import" not in html and "fetch" not in html
    assert set(re.findall(r"url\((.*?)\)", html)) <= {"#hatch"}


def test_the_page_follows_light_and_dark_and_the_width_of_a_phone():
    html = render_studies_page(SUMMARY)
    assert "prefers-color-scheme: dark" in html and 'name="viewport" content="width=device-width' in html


def test_an_undecided_claim_says_what_would_decide_and_which_clauses_are_open():
    some = copy.deepcopy(SUMMARY)
    clauses = [("a: 1 and 2", True, "undecided", "", False), ("b: 3", False, "undecided", "", True)]
    cells = [cell("bn/eps8", [0], 1.0), cell("bn/eps16", [], None)]
    open_claim = {"verdict": "undecided", "needs": "1 more cell", "networks": 2, "clauses": clauses}
    some["studies"][1]["results"] = [result(protocol="fast", cells=cells, **open_claim)]
    text = Reader(render_studies_page(some)).text
    assert "◐ undecided protocol fast, 1 of 2 cells, 1 seed, 2 independent networks; 1 more cell would decide" in text
    assert "undecided, holds as measured: a: 1 and 2" in text and "fails on one network: b: 3" in text
    assert count_verdicts(some)["undecided"] == 1 - count_verdicts(some)["not run"]


def test_records_without_results_per_image_are_counted():
    text = Reader(section(render_studies_page(SUMMARY), "D-fig4")).text
    assert "no results per image 1 records" in text
    assert "no results per image" not in Reader(section(render_studies_page(SUMMARY), "A-table2")).text


def test_the_markdown_page_lists_every_claim_with_its_evidence():
    text = results_markdown(SUMMARY)
    assert text.startswith("The five papers make 3 claims: 1 supported, 1 contradicted, 0 undecided, 1 not run.")
    assert (
        "Verdicts other than not run: 1 by `paper` (the schedule as printed), 1 by `fast` (a shortened schedule)."
        in text
    )
    assert "from 4 trained networks and 0.2 GPU hours" in text
    assert "- ✗ fails: the loss <falls>: 3 and 1" in text and "1 records without results per image" in text
    assert "**Contradicted, on 1 network** by `paper`" in text
    assert "The paper's own numbers fail: even <print> fails." in text and "Deviations: D/fig4 <deviates>." in text
    assert "Margins: far: by 3 (our margin: <none>)." in text
    assert text.index("## Not run") < text.index("- **A/table4** (1 cell on cifar10): claim <of> A/table4")
    smoked = copy.deepcopy(SUMMARY)
    smoked["studies"][1]["results"] = [result(protocol="smoke", cells=[cell("x", [0], 1.0)])]
    assert "- **A/table4**: claim <of> A/table4" in results_markdown(smoked)


def test_cells_without_a_record_are_counted_by_data_set():
    cells = [cell("a", [], None), cell("b", [], None, data="svhn"), cell("c", [0], 1.0), cell("d", [], None)]
    assert missing_cells(result(cells=cells)) == "2 cells on cifar10, 1 cell on svhn"
    assert missing_cells(result(cells=cells[2:3])) == ""
    some = copy.deepcopy(SUMMARY)
    some["studies"][0]["results"][0]["cells"] = cells
    assert "1 of 4 cells; " in (text := results_markdown(some))
    assert "no record of 2 cells on cifar10, 1 cell on svhn" in text


def test_margins_deviations_and_what_print_fails_stand_beside_the_clauses():
    text = Reader(section(render_studies_page(SUMMARY), "D-fig4")).text
    assert "The paper's own numbers fail: even <print> fails." in text
    assert "Deviations: D/fig4 <deviates>." in text and "Margins: far: by 3 (our margin: <none>)." in text


def test_a_study_under_two_protocols_shows_both_and_counts_once():
    both = copy.deepcopy(SUMMARY)
    both["studies"][1]["results"] = [result(protocol="paper"), result(protocol="fast", verdict="supported")]
    assert count_verdicts(both) == {"supported": 2, "contradicted": 1, "undecided": 0, "not run": 0}
    text = Reader(section(render_studies_page(both), "A-table4")).text
    assert "Protocol paper: the schedule as printed" in text and "Protocol fast: a shortened schedule" in text


@pytest.mark.parametrize(
    ("minutes", "text"),
    [({}, None), ({"cpu": 0.25}, "0.2 CPU minutes"), ({"NVIDIA H200": 61.24}, "61.2 GPU minutes (NVIDIA H200)")],
)
def test_cost_as_text(minutes, text):
    assert format_cost(minutes) == text


def test_dots_stand_at_their_values_and_a_spread_stays_on_the_axis():
    dot = {"label": "a", "hint": "h"}
    dots = [
        {**dot, "paper": 0.0, "ours": 100.0, "spread": 50.0},
        {**dot, "paper": 50.0, "ours": 25.0, "spread": None},
    ]
    svg = draw_figure({"kind": "dots", "title": "t", "groups": [("g", dots)]})
    _, *ours = (float(x) for x in re.findall(r'<circle cx="([\d.]+)"', svg))  # the first is the legend's
    _, *paper = (float(x) for x in re.findall(r'<path d="M([\d.]+) [\d.]+l5', svg))
    full = ours[0] - paper[0]
    assert paper[1] - paper[0] == pytest.approx(full / 2, abs=0.2)
    assert ours[1] - paper[0] == pytest.approx(full / 4, abs=0.2)
    start, end = map(float, re.search(r'd="M([\d.]+) [\d.]+H([\d.]+)" class="spread"', svg).groups())
    assert end == ours[0] and start == pytest.approx(paper[1], abs=0.2)


@pytest.mark.parametrize("values", [[0.0], [-3.0, -1.0], [1e-6, 3e-6], [4000.0, 2.0], []])
def test_an_axis_holds_whatever_values_there_are(values):
    dots = [{"label": "a", "hint": "h", "paper": value, "ours": None, "spread": None} for value in values]
    assert "nan" not in draw_figure({"kind": "dots", "title": "t", "groups": [("g", dots)]})


def test_the_page_needs_no_torch():
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"
        "package = types.ModuleType('advnorm')\n"
        f"package.__path__ = [{str(Path(advnorm.__file__).parent)!r}]\n"
        "sys.modules['advnorm'] = package\n"
        "from advnorm.report import render_studies_page\n"
        f"print(render_studies_page({SUMMARY!r}))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, encoding="utf-8")
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == render_studies_page(SUMMARY).strip()


# -- the command -------------------------------------------------------------------------------------------------------


def run_report(results, out):
    result = invoke("report", results, "--out", out)
    return result.exit_code, result.output


def test_the_command_writes_the_page_and_reports_problems(tmp_path):
    broken = tmp_path / "results" / "records" / "A" / "table2" / "single" / "eps16" / "fast-seed0.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    code, text = run_report(tmp_path / "results", tmp_path / "deep" / "report.html")
    assert code == 0 and "fast-seed0.json is skipped" in text and "0 supported, 0 contradicted, 0 undecided" in text
    html = (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    assert "fast-seed0.json is skipped" in Reader(html).text and "Nothing was run yet" in html


def test_the_command_rejects_a_missing_folder_and_an_output_folder(tmp_path):
    with raises_problem("missing_file", "out"):
        run_report(tmp_path / "nowhere", tmp_path / "report.html")
    with pytest.raises(ConfigError):
        run_report(tmp_path, tmp_path)


# -- in a browser ------------------------------------------------------------------------------------------------------


def chromium():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(chromium() is None, reason="needs Chromium")
def test_in_a_browser_a_link_opens_its_study_and_pointing_shows_the_conditions(tmp_path):
    probe = (
        "<script>addEventListener('load', () => {"
        "  const row = document.querySelectorAll('.row')[2];"
        "  row.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));"
        "  document.title = JSON.stringify({"
        "    open: document.getElementById('A-table4').open,"
        "    caption: row.closest('figure').querySelector('figcaption').textContent,"
        "    fits: document.documentElement.scrollWidth <= innerWidth,"
        "  });"
        "});</script></body>"
    )
    page = tmp_path / "page.html"
    page.write_text(render_studies_page(SUMMARY).replace("</body>", probe), encoding="utf-8")
    done = subprocess.run(
        [
            *(chromium(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--window-size=390,844", "--dump-dom", f"{page.as_uri()}#A-table4"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = json.loads(unescape(re.search(r"<title>(.*?)</title>", done.stdout, re.S)[1]))
    assert found["open"] and found["fits"]
    assert found["caption"].startswith("Cross <BN>, clean: paper 59.56, ours not run")
