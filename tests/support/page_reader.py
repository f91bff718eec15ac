"""A page as a browser would read it, strictly."""

from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Fails on tags that do not match; collects tags, attributes and the text outside of style and script."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.attributes, pieces = [], [], [], []
        self.handle_data = lambda data: None if {"style", "script"} & set(self.open) else pieces.append(data)
        self.feed(html)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(pieces).split())

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
