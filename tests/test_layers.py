"""Imports go down only: the order of the layers is that of the architecture."""

import ast
import subprocess
import sys
from collections.abc import Container, Iterable
from pathlib import Path

import pytest

import advnorm

PACKAGE = Path(advnorm.__file__).parent

# From the bottom up. A module may import its own layer and those below.
LAYERS = [
    "_core",
    "threat",
    "norms",
    "surgery",
    "models",
    "data",
    "attacks",
    "objectives",
    "config",
    "training",
    "evaluation",
    "analysis",
    "studies",
    "papers",
    "report",
    "sharing",
    "bench",
    "cli",
]
TOP = {"__init__", "_public", "__main__"}  # the public names and the command: above everything
CORE_MAY_USE = {"torch", "triton", "advnorm", "rich"}  # Triton comes with a torch that has CUDA; rich draws progress
# `report` is read where no torch is installed.
FREE_OF_TORCH = {"report"}


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(source: str) -> set[str]:
    """Absolute names of everything that a source imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute, so that a layer can be read off them"
            found.add(node.module or "")
            if node.module == "advnorm":
                found |= {f"advnorm.{alias.name}" for alias in node.names}
    return found


def import_graph(sources: Iterable[Path]) -> dict[str, set[str]]:
    """Modules to the modules of the package that they import, also inside functions and under TYPE_CHECKING."""
    files = {".".join(("advnorm", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in sources}
    modules = {name.removesuffix(".__init__"): path for name, path in files.items()}
    return {name: edges(path.read_text(), modules) - {name} for name, path in modules.items()}


def edges(source: str, modules: Container[str]) -> set[str]:
    """The modules that a source imports. ``from package import module`` is an edge to the module alone."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in named}
    return {name for name in found if name in modules}


def import_cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules each of which imports all others of its group, directly or not."""
    reached = {name: set(imports) for name, imports in graph.items()}
    changed = True
    while changed:
        changed = False
        for name, targets in reached.items():
            more = set().union(*(reached[target] for target in targets)) - targets if targets else set()
            changed |= bool(more)
            reached[name] = targets | more
    return {
        frozenset(other for other in reached if name in reached[other] and other in reached[name])
        for name in reached
        if name in reached[name]
    }


def upward_edges(layer: str, imports: set[str]) -> list[str]:
    """Imports of a layer above ``layer``."""
    edges = []
    for name in imports:
        parts = name.split(".")
        if parts[0] != "advnorm" or len(parts) < 2 or parts[1] not in LAYERS:
            continue
        if LAYERS.index(parts[1]) > LAYERS.index(layer):
            edges.append(name)
    return edges


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if layer_of(path) not in TOP)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    layer = layer_of(path)
    assert layer in LAYERS, f"{layer} has no place among the layers; add it where it belongs"
    imports = imported_modules(path.read_text())
    assert upward_edges(layer, imports) == []
    if layer != "cli":  # a verb may look up the version
        assert "advnorm" not in imports, "import from the module that defines a name, not from the package"


@pytest.mark.parametrize("path", [p for p in SOURCES if layer_of(p) == "_core"], ids=lambda path: path.name)
def test_the_core_uses_torch_and_the_standard_library_only(path):

    roots = {name.split(".")[0] for name in imported_modules(path.read_text())}
    assert roots - set(sys.stdlib_module_names) <= CORE_MAY_USE


@pytest.mark.parametrize("path", [p for p in SOURCES if layer_of(p) in FREE_OF_TORCH], ids=lambda path: path.name)
def test_reports_are_made_without_torch(path):
    assert not {name for name in imported_modules(path.read_text()) if name.split(".")[0] == "torch"}


def test_no_modules_import_each_other():
    assert import_cycles(import_graph(SOURCES)) == set()


def test_an_import_cycle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert import_cycles(graph) == {frozenset("abc")}


def test_an_upward_edge_is_found():
    source = "from advnorm.models import create_model\nimport advnorm.cli\nfrom advnorm import training"
    assert sorted(upward_edges("norms", imported_modules(source))) == [
        "advnorm.cli",
        "advnorm.models",
        "advnorm.training",
    ]


def test_no_module_is_named_utils_or_helpers():
    assert not [path for path in PACKAGE.rglob("*.py") if path.stem in {"utils", "util", "helpers", "misc", "common"}]


@pytest.mark.parametrize(
    "program",
    [
        "from advnorm.report import to_rich_table, ReportTable; import advnorm.report.studies",
        "from advnorm.cli.app import app",
        "import advnorm; advnorm.__version__",
    ],
)
def test_reports_and_help_need_no_torch(program):
    blocked = f"import sys; sys.modules['torch'] = None; {program}"  # an import of it raises
    out = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr


def test_lists_do_not_import_the_compiler():
    program = "import sys, advnorm.cli.listing; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("name", ["norms", "training", "create_model", "report", "__all__"])
def test_any_public_name_can_be_the_first_import(name):
    asked = f"import advnorm; assert advnorm.{name} and set(advnorm.__all__) <= set(dir(advnorm))"
    out = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr


def test_an_unknown_name_is_not_an_attribute():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        advnorm.nonsense  # noqa: B018
    assert not hasattr(advnorm, "__wrapped__") and not hasattr(advnorm, "not.there")
    assert {"norms", "train", "__version__"} <= set(dir(advnorm)) and "import_module" not in dir(advnorm)
