"""Tutorials: Python files in percent format are executed by a Jupyter kernel and become pages and notebooks.

A notebook holds what its page shows, so that it opens with all outputs. Pictures need a description:
``# %% alt="What the picture shows"``.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

#: Tutorials that run at the same time, each with one thread.
WORKERS = 2
KERNEL_OPTIONS = [
    "--InlineBackend.figure_formats=svg",
    f"--IPKernelApp.exec_files={Path(__file__).with_name('kernel_startup.py')}",
]
ENVIRONMENT = {
    "COLUMNS": "100",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "RAY_AUTH_MODE": "disabled",  # a cluster of one machine, for the length of a command
}


def write_tutorials(sources: Path, out: Path) -> None:
    """Execute every tutorial in ``sources``; write its page, its pictures and its notebook to ``out``."""
    os.environ.update(ENVIRONMENT)
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda source: write_tutorial(source, out), sorted(sources.glob("*.py"))))


def write_tutorial(source: Path, out: Path) -> None:
    """Execute one tutorial in an empty folder and write its page and notebook."""
    notebook = jupytext.read(source)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = source.parents[2]  # a tutorial runs as in the root of the repository
        Path(folder, "results").symlink_to(root / "results")
        shutil.copytree(root / "examples", Path(folder, "examples"))  # an installation writes into it
        sockets = Path(folder, ".kernel")
        sockets.mkdir()
        kernel = Config(KernelManager={"transport": "ipc", "connection_file": str(sockets / "kernel.json")})  # no ports
        options = {"resources": {"metadata": {"path": folder}}, "timeout": 300, "extra_arguments": KERNEL_OPTIONS}
        NotebookClient(notebook, config=kernel, kernel_name="python3", **options).execute()
    print(f"tutorial {source.stem}: {time.perf_counter() - start:.0f} s")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{source.stem}.md").write_text(Renderer(source.stem, out).page(notebook))
    for cell in notebook.cells:
        if cell.cell_type == "markdown":  # a notebook lies beside the pages of the site
            cell.source = re.sub(r"(\]\((?!https?:)[^)\s]+)\.md\b", r"\1.html", cell.source)
    nbformat.write(notebook, out / f"{source.stem}.ipynb")


class Renderer:
    """The page of an executed notebook; pictures are written beside it."""

    def __init__(self, name: str, out: Path) -> None:
        self.name, self.out, self.pictures = name, out, 0

    def page(self, notebook: Any) -> str:
        parts = [part for cell in notebook.cells for part in self._cell(cell)]
        title, _, rest = "\n\n".join(parts).partition("\n")
        return f"{title}\n\n[Open as a notebook]({self.name}.ipynb){{ .notebook download }}\n{rest}\n"

    def _cell(self, cell: Any) -> list[str]:
        if cell.cell_type == "markdown":
            return [cell.source]
        if not cell.source.startswith("!"):
            shown, language = _fence("python", cell.source), "{ .text .output }"
        else:
            commands = "\n".join(f"$ {line.removeprefix('!')}" for line in cell.source.splitlines())
            shown = _fence("console", commands)
            language = "python" if re.fullmatch(r"!cat \S+\.py", cell.source) else "{ .text .output }"
        return [shown, *(self._output(output, language, cell.metadata.get("alt")) for output in _joined(cell.outputs))]

    def _output(self, output: Any, language: str, alt: str | None) -> str:
        if output.output_type == "stream":
            return _fence(language, re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", output.text).rstrip())
        data = output.data
        if "image/svg+xml" in data:
            assert alt, f"a picture of {self.name} has no description"
            self.pictures += 1
            file = f"{self.name}_{self.pictures}.svg"
            (self.out / file).write_text(data["image/svg+xml"])
            return f"![{alt}]({file})"
        if "text/html" in data:
            table = re.search("<table.*</table>", data["text/html"], re.DOTALL)
            return f'<div class="output">{table[0]}</div>'
        return _fence(language, data["text/plain"])


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _joined(outputs: list[Any]) -> list[Any]:
    """The outputs of a cell; consecutive texts are one."""
    joined: list[Any] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined
