"""The examples in the README and the docs run as they stand, and generated parts are current."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
SITE = sorted((ROOT / "docs").rglob("*.md"))
#: A fenced block: its language and its text.
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
EXAMPLES = [page for page in (README, *SITE) if "```python" in page.read_text()]


@pytest.fixture(autouse=True)
def _registries_are_restored(monkeypatch):
    from advnorm.analysis import ANALYSES
    from advnorm.attacks import ATTACKS
    from advnorm.data import DATASETS
    from advnorm.models import MODELS
    from advnorm.norms import NORMS
    from advnorm.objectives import OBJECTIVES

    for registry in (ANALYSES, ATTACKS, DATASETS, MODELS, NORMS, OBJECTIVES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture
def site_code(monkeypatch):
    """Modules of the site's build are found by name."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_site"))
    yield
    for name in ("check_links", "diagrams", "generated"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_in_order(page, capsys):
    namespace, printed = {}, None
    for number, (language, text) in enumerate(BLOCK.findall(page.read_text()), 1):
        if language == "python":
            exec(compile(text, f"{page.name}, block {number}", "exec"), namespace)
            printed = capsys.readouterr().out
        elif language == "text" and printed is not None:  # what the block above prints; … is any text
            pattern = ".*".join(re.escape(part) for part in text.split("…"))
            assert re.fullmatch(pattern, printed), f"{page.name}, block {number}: {printed}"


def test_every_guide_shows_code_and_every_page_belongs_to_the_site():
    nav = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in SITE if str(page.relative_to(ROOT / "docs")) not in nav] == []
    tutorials = [path.stem for path in (ROOT / "docs" / "tutorials").glob("*.py")]
    index = (ROOT / "docs" / "tutorials" / "index.md").read_text()
    assert [name for name in tutorials if f"tutorials/{name}.md" not in nav or f"({name}.md)" not in index] == []
    assert [page.name for page in SITE if page.parent.name == "guides" and "```" not in page.read_text()] == [
        "index.md"
    ]


@pytest.mark.parametrize("page", [README, CONTRIBUTING, ROOT / "SECURITY.md"], ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page):
    """Links of the site are checked where it is built."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_table_of_norms_lists_every_norm():
    from advnorm import list_norms

    table = (ROOT / "docs" / "reference" / "norms.md").read_text()
    assert [name for name in list_norms() if f"`{name}`" not in table] == []


def test_the_make_targets_that_the_pages_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in [README, CONTRIBUTING, *SITE]:
        named = re.findall(r"(?:^|\$ |`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE)  # commands, not prose
        assert set(named) <= targets


def test_the_tables_of_the_pages_come_from_the_records():
    import importlib.util

    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "benchmarks" / "readme_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for name in tables.PAGES:
        page = (ROOT / name).read_text()
        assert tables.rendered(name, page) == page, "run python benchmarks/readme_tables.py"
    assert len(list(tables.RECORDS.glob("*.json"))) >= 2


def test_the_picture_of_the_readme_comes_from_the_records(site_code):
    from diagrams import PICTURE, false_robustness

    assert PICTURE.read_text() == false_robustness().svg(), "run python docs/_site/diagrams.py"


def test_the_citation_names_the_version():
    from advnorm import __version__

    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_reference_lists_what_is_registered_and_every_command(site_code):
    from generated import fill_markers

    import advnorm
    from advnorm.cli.app import app

    assert "| dual_bn |" in fill_markers("<!-- ls: norms -->")
    names = fill_markers("<!-- public names -->")
    assert [name for name in advnorm.__all__ if f"`advnorm.{name}`" not in names] == []
    commands = fill_markers("<!-- commands -->")
    verbs = [command.callback.__name__ for command in app.registered_commands]
    assert [verb for verb in verbs if f"## `advnorm {verb}`" not in commands] == []
    assert "$ advnorm train --set norm=dual_bn eps=0.2\n" in commands


def test_broken_links_resources_from_the_network_and_lost_pages_are_found(site_code, tmp_path):
    from check_links import link_problems

    (tmp_path / "index.html").write_text(
        '<a href="a.html#here"><a href="a.html#nowhere"><a href="none.html"><img src="https://x.org/p.png">'
    )
    (tmp_path / "a.html").write_text('<h2 id="here"><a href="https://example.org">')
    (tmp_path / "lost.html").write_text("")
    assert sorted(link_problems(tmp_path)) == [
        "index.html links to a.html#nowhere",
        "index.html links to none.html",
        "index.html loads https://x.org/p.png",
        "no page links to lost.html",
    ]
