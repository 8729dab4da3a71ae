"""Whether a test that is named somewhere exists: ``FILE::NAME`` or ``FILE::CLASS::NAME``, below tests/."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def exists(reference: str) -> bool:
    """Whether the file is there and defines the name; a file alone counts, too."""
    file, *names = reference.split("::")
    path = TESTS / file
    if not path.is_file():
        return False
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for name in names:
        node = next((n for n in body if isinstance(n, _NAMED) and n.name == name), None)
        if node is None:
            return False
        body = node.body
    return True
