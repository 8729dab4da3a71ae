"""The pages of the docs, taken apart: links, headings, code, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
RUNNABLE = "<!-- runnable -->"


@dataclass(frozen=True)
class Code:
    """A code span or a block of code."""

    line: int  # where it, or the paragraph or table row around it, begins
    text: str
    is_block: bool
    language: str = ""
    runnable: bool = False  # marked so in the line before it


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    file: Path

    @property
    def name(self) -> str:
        """As errors name it."""
        return str(self.file.relative_to(ROOT)) if self.file.is_relative_to(ROOT) else self.file.name

    @property
    def tokens(self) -> list[Token]:
        """Of the parser."""
        return _parsed(self.file.read_text(encoding="utf-8"))

    def links(self) -> Iterator[tuple[int, str]]:
        """Line and target of every link and picture."""
        for token in self.tokens:
            for child in token.children or ():
                target = child.attrGet("href") or child.attrGet("src")
                if target:
                    yield _line(token), str(target)

    def anchors(self) -> set[str]:
        """What a link may name behind #, as GitHub makes them of headings."""
        found: set[str] = set()
        for opening, inline in zip(self.tokens, self.tokens[1:], strict=False):
            if opening.type == "heading_open":
                text = "".join(child.content for child in inline.children or ())
                slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
                number = sum(
                    anchor == slug or re.fullmatch(re.escape(slug) + r"-\d+", anchor) is not None for anchor in found
                )
                found.add(f"{slug}-{number}" if number else slug)
        return found

    def code(self) -> Iterator[Code]:
        """Every code span and block."""
        marked = False
        for token in self.tokens:
            if token.type in ("fence", "code_block"):
                yield Code(_line(token), token.content, True, token.info.strip(), marked)
            for child in token.children or ():
                if child.type == "code_inline":
                    yield Code(_line(token), child.content, False)
            marked = token.type == "html_block" and token.content.strip() == RUNNABLE

    def tables(self) -> Iterator[list[list[str]]]:
        """Each table as rows of cells, the head first; cells as Markdown."""
        rows: list[list[str]] = []
        for token, content in zip(self.tokens, self.tokens[1:], strict=False):
            if token.type == "table_open":
                rows = []
            elif token.type == "tr_open":
                rows.append([])
            elif token.type in ("td_open", "th_open"):
                rows[-1].append(content.content)
            elif token.type == "tr_close" and content.type == "tbody_close":
                yield rows


@cache
def _parsed(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


def _line(token: Token) -> int:
    return token.map[0] + 1 if token.map else 0


def folders() -> list[Path]:
    """The folders of the repository that hold pages and code."""
    made = {"build", "dist"}
    return [path for path in sorted(ROOT.iterdir()) if path.is_dir() and path.name[0] != "." and path.name not in made]


def pages() -> list[Page]:
    """Every Markdown file of the repository."""
    found = [*ROOT.glob("*.md"), *(file for folder in folders() for file in folder.rglob("*.md"))]
    return [Page(file) for file in sorted(found)]


def page_of(text: str, folder: Path) -> Page:
    """A page with this text, for the checks' own tests."""
    file = folder / "page.md"
    file.write_text(text, encoding="utf-8")
    return Page(file)
