"""Checks of a report page: complete, self-contained, without scripts."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

VOID = {"meta", "br", "link"}


class Balanced(HTMLParser):
    """Raises AssertionError if a closing tag does not match the open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def checked(page: str) -> str:
    """Returns the page after checks that apply to any page."""
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    for svg in re.findall(r"<svg.*?</svg>", page, re.S):
        ET.fromstring(svg)
    assert "<script" not in page and not re.search(r"""(src|href)=["']?http""", page)
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.S).split()
    return page
