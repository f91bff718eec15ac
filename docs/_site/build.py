"""Build the documentation site: ``python docs/_site/build.py``, or ``make docs``.

Pages under docs/ are copied to build/docs, where generated parts, diagrams and executed tutorials are added. Zensical
renders that folder strictly into site/. Then every link of the rendered pages is checked. Nothing needs a network.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from check_links import link_problems
from diagrams import write_diagrams
from generated import fill_markers
from tutorials import write_tutorials

ROOT = Path(__file__).resolve().parents[2]
STAGE, SITE = ROOT / "build" / "docs", ROOT / "site"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--keep-tutorials", action="store_true", help="Reuse the tutorials of the last build.")
    keep = parser.parse_args().keep_tutorials
    start = time.perf_counter()
    if not keep:
        shutil.rmtree(STAGE, ignore_errors=True)
    left_out = shutil.ignore_patterns("_site", "*.py", "__pycache__")
    shutil.copytree(ROOT / "docs", STAGE, ignore=left_out, dirs_exist_ok=True)
    write_diagrams(STAGE / "assets" / "diagrams")
    for page in STAGE.rglob("*.md"):
        page.write_text(fill_markers(page.read_text()))
    if not keep:
        write_tutorials(ROOT / "docs" / "tutorials", STAGE / "tutorials")
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=ROOT, check=True)
    problems = link_problems(SITE)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{SITE.relative_to(ROOT)}/index.html, built in {time.perf_counter() - start:.0f} s")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
