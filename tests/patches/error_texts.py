"""Error texts, collected from the code and from the docs, and whether one quotes the other.

A text of the code has holes where values go in.  A quote in the docs has sample values there, or "...".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "sglang_dcp_block"
PAGES = ("operations.md", "compatibility.md")
# What an operator meets: refused starts, refused peers, and what is logged as a warning or an error.
CALLS = {"BlockSizeError", "DisagreementError", "PatchError", "Refusal", "_explain", "_refuse"}
LOGGED = {"warning", "error"}
HOLE = "\0"
# Sample values, which stand for a hole: flags with a number, numbers, ids, names, lists, and what "..." leaves out.
SAMPLE = re.compile(
    r"\.\.\.|--dcp-\S+ (?:\d+|auto)(?= cannot| resolves|:)|\[[\d, ]+\]|\b\d+(?:\.\d+)*(?::\d+)?\b|\b[A-Z]\b|'auto'"
    r"|\b(?:fa3|file|mooncake|triton|torch_native)\b|\bGQA and MHA\b"
)


def texts() -> list[str]:
    """Every text of the package, with a hole for each value."""
    return [text for tree in _trees() for text in _whole(tree)]


def met_by_operators() -> list[str]:
    """The texts that an operator meets, without those that only pass another text on."""
    found = []
    for tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name in ("why_not", "require_echo"):
                found += [text for text in _whole(node) if re.match(r"expected |prefill sent ", text)]
            if isinstance(node, ast.Call) and _is_told(node.func):
                found += [text for argument in node.args if (text := _flat(argument)) is not None]
    return [text for text in dict.fromkeys(found) if len(text.replace(HOLE, "").strip(" :")) > 12]


def quoted() -> list[str]:
    """Errors that the tables of the operators' page quote: the first cells of tables of errors and messages."""
    page, found, counts = (ROOT / "docs" / PAGES[0]).read_text(encoding="utf-8"), [], False
    for line in page.splitlines():
        if not line.startswith("|"):
            counts = False
        elif re.match(r"\| (error of a request|message|log line) \|", line):
            counts = True
        elif counts:
            found += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    return found


def all_quotes() -> list[str]:
    """Everything in backticks or indented on the operators' pages, one line each."""
    found = []
    for name in PAGES:
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        found += re.findall(r"`([^`\n]+)`", page) + re.findall(r"^    +(.+)$", page, re.MULTILINE)
    return found


def quotes(quote: str, text: str) -> bool:
    """Whether ``quote`` is a piece of ``text`` with values in its holes.

    >>> quotes("got block size 6 with page size ...", "expected it, got block size \\0 with page size \\0. Change it.")
    True
    """
    plain = re.sub(r"%(?:\.\d+)?[a-z]", HOLE, text).replace("\n", " ")
    plain = re.sub(r"\b\d+\b", HOLE, plain)
    pattern, end = "", 0
    for sample in SAMPLE.finditer(quote):
        value = ".*?" if sample.group() == "..." else f"(?:{HOLE}|{re.escape(sample.group())})"
        pattern += re.escape(quote[end : sample.start()]) + value
        end = sample.end()
    pattern += re.escape(quote[end:])
    return re.search(pattern, plain) is not None


def exists(quote: str, among: list[str]) -> bool:
    """Whether ``quote`` is a piece of a text, or of two or more of them, one passed on by the other."""
    if any(quotes(quote, text) for text in among):
        return True
    ends = [colon.start() for colon in re.finditer(": ", quote)]
    return any(exists(quote[:end], among) and exists(quote[end + 2 :], among) for end in ends)


def _trees() -> Iterator[ast.Module]:
    for file in sorted(PACKAGE.rglob("*.py")):
        yield ast.parse(file.read_text(encoding="utf-8"))


def _is_told(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr in LOGGED and isinstance(function.value, ast.Name) and function.value.id == "logger"
    return isinstance(function, ast.Name) and function.id in CALLS


def _whole(node: ast.AST) -> Iterator[str]:
    """The texts inside a node, those with holes in one piece."""
    text = _flat(node)
    if text is not None:
        yield text
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from _whole(child)


def _flat(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return None
