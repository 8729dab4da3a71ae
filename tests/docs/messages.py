"""Whether an error that the docs quote is one that the code can say.

Quoted text is compared word by word with the strings of the source.  What a string fills in at run time stands for any
words, and so does an ellipsis in the docs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

HOLE = "\0"


def strings_of(source: str) -> list[str]:
    """All strings of a Python file, what is filled in as :data:`HOLE`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%[sdgr]|%\.\d+f|\{\w*\}", HOLE, node.value))
    return [text for text in found if len(text.split()) > 2]


def can_say(strings: Iterable[str], quoted: str) -> bool:
    """Whether one of the strings can become a text that contains ``quoted``."""
    words = quoted.split()
    return any(_aligns(words, text.split()) for text in strings)


def _aligns(words: list[str], pattern: list[str]) -> bool:
    """Whether ``words`` are a run of what ``pattern`` stands for; at least two of them as they are."""

    @cache
    def from_here(i: int, j: int, literal: int) -> bool:
        if i == len(words):
            return literal >= 2
        if words[i].strip(".") == "":  # an ellipsis: any words of the string
            return i + 1 == len(words) or any(from_here(i + 1, k, literal) for k in range(j, len(pattern) + 1))
        if j == len(pattern):
            return False
        if HOLE not in pattern[j]:
            # A quotation may end before a comma.
            same = words[i] == pattern[j] or (i + 1 == len(words) and words[i] == pattern[j].rstrip(",.:;"))
            return same and from_here(i + 1, j + 1, min(literal + 1, 2))
        # A hole may stand for several words; what is around it in its own word must be there.
        before, after = pattern[j].split(HOLE)[0], pattern[j].split(HOLE)[-1]
        if not words[i].startswith(before):
            return False
        return any(
            words[k].rstrip(",.").endswith(after.rstrip(",.")) and from_here(k + 1, j + 1, literal)
            for k in range(i, len(words))
        )

    return any(from_here(0, j, 0) for j in range(len(pattern)))


@cache
def strings_under(folder: Path) -> tuple[str, ...]:
    """Strings of all Python files below a folder."""
    files = sorted(folder.rglob("*.py"))
    return tuple(text for file in files for text in strings_of(file.read_text(encoding="utf-8")))
