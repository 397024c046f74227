"""Reads a page strictly: every element is closed in order, attributes are quoted once, nothing comes from the network."""

import html.parser
import json
import re

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.data, self.cells = [], [], [], {}, []
        self.feed(text)
        self.close()
        assert self.open == [], f"not closed: {self.open}"
        assert text.startswith("<!doctype html>")
        assert not re.search(r"https?://|@import|url\(|<(?:img|link|iframe|object)\b", text)

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), f"an attribute twice: {tag} {names}"
        assert not {"src", "href", "onclick", "onload", "onerror"} & set(names)
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append((tag, dict(attributes)))

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1][0] == tag, f"</{tag}> closes {self.open[-1]}"
        self.open.pop()

    def handle_data(self, data):
        tag, attributes = self.open[-1] if self.open else ("", {})
        if tag == "script" and attributes.get("type") == "application/json":
            self.data[attributes["id"]] = json.loads(data, parse_constant=lambda c: 1 / 0)
        elif tag not in ("script", "style"):
            self.words.append(data)
            if tag == "td":
                self.cells.append(data)

    @property
    def text(self):
        return " ".join(self.words)
