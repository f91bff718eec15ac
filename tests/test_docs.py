"""The examples in the README and the docs run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(autouse=True)
def _registries_are_restored(monkeypatch):
    from advnorm.models import MODELS
    from advnorm.norms import NORMS

    for registry in (MODELS, NORMS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_in_order(page, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks, "a page shows what it is about"
    namespace = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readme_lists_every_norm():
    from advnorm import list_norms

    table = (ROOT / "README.md").read_text()
    assert [name for name in list_norms() if f"`{name}`" not in table] == []


def test_the_make_targets_that_the_pages_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
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
