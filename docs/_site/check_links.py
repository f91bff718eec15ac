"""Check the rendered site: links and anchors exist, nothing is loaded from the network, every page is reachable."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Attributes that load something, and links that a reader follows.
LOADED, FOLLOWED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}, {("a", "href")}


class Page(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, bool]] = []  # target, and whether the browser loads it
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif (tag, name) in LOADED | FOLLOWED and value:
                self.links.append((value, (tag, name) in LOADED))


def link_problems(site: Path) -> list[str]:
    """Every broken link, every resource from the network, and every page without a link to it."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    problems, linked = [], {site / "index.html", site / "404.html"}
    for path, page in pages.items():
        for target, loaded in page.links:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if loaded and parts.scheme != "data":
                    problems.append(f"{path.relative_to(site)} loads {target}")
                continue
            if path.name == "404.html":  # its links start at the root of the server
                continue
            found = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            found = found / "index.html" if found.is_dir() else found
            if path != found:
                linked.add(found)
            if not found.exists() or (parts.fragment and unquote(parts.fragment) not in pages[found].anchors):
                problems.append(f"{path.relative_to(site)} links to {target}")
    return problems + [f"no page links to {path.relative_to(site)}" for path in pages if path not in linked]


if __name__ == "__main__":
    found = link_problems(Path(sys.argv[1]).resolve())
    print("\n".join(found) or "no broken links")
    sys.exit(bool(found))
