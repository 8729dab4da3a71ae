"""Fingerprints of upstream definitions: is the code that a patch was written for still the code that runs?

A fingerprint is the first 16 hex digits of SHA-256 over the definition's source lines, decorators included, dedented and
with trailing blanks, and comments after the last statement, removed.  It is taken from the text of the file, so it
needs no import, is the same under every Python version, and works on any unpacked SGLang wheel (:func:`from_tree`).
:func:`from_live` takes it from the object that this process would really call, which also catches a definition replaced
by somebody else.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import pkgutil
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

KNOWN_FILE = Path(__file__).with_name("fingerprints.json")


class TargetMissingError(LookupError):
    """A dotted path names no definition of this SGLang."""


def of_source(source: str) -> str:
    """Fingerprint of one definition's source text."""
    lines = [line.rstrip() for line in textwrap.dedent(source).strip("\n").split("\n")]
    while lines and (not lines[-1] or lines[-1].lstrip().startswith("#")):
        lines.pop()  # the parser leaves them out, the inspect module takes them in
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def from_tree(target: str, tree: Path) -> str:
    """Fingerprint of ``target`` in the SGLang source tree whose package folder is ``tree``; errors as :func:`source_in`."""
    return of_source(source_in(target, tree))


def source_in(target: str, tree: Path) -> str:
    """Source text of ``target`` in the SGLang source tree whose package folder is ``tree``.

    Args:
        target: dotted path, ``sglang.<module>.<name>[.<name>]``.
        tree: the folder that holds SGLang's ``__init__.py``.
    Raises:
        TargetMissingError: no such module, or no such definition in it.
    """
    file, qualname = _split(target, tree)
    text, module = _parsed(file)
    body: list[ast.stmt] = module.body
    node: ast.stmt | None = None
    for name in qualname:
        # The last definition of a name is the one that Python keeps.
        node = next((n for n in reversed(body) if isinstance(n, _DEFINITION) and n.name == name), None)
        if node is None:
            raise TargetMissingError(f"{file.relative_to(tree)} defines no {'.'.join(qualname)}")
        body = getattr(node, "body", [])
    if not isinstance(node, _DEFINITION):
        raise TargetMissingError(f"{file.relative_to(tree)} is a module, not a definition")
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    # Not splitlines(): the parser does not count form feeds and Unicode separators as line ends.
    return "\n".join(text.split("\n")[first - 1 : node.end_lineno])


def from_live(target: str) -> str:
    """Fingerprint of the object that ``target`` resolves to in this process, under any wrappers.

    Raises:
        TargetMissingError: the path does not resolve, or what it resolves to has no Python source.
    """
    found = inspect.unwrap(resolve(target))
    try:
        return of_source(inspect.getsource(getattr(found, "fn", found)))  # a Triton kernel's text is its function's
    except (OSError, TypeError) as error:
        raise TargetMissingError(f"no Python source behind it: {error}") from error


def resolve(target: str) -> Any:
    """The object behind a dotted path, static and class methods as their plain functions."""
    owner_path, _, name = target.rpartition(".")
    try:
        owner = pkgutil.resolve_name(owner_path)
        found = inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TargetMissingError(str(error)) from error
    return found.__func__ if isinstance(found, (classmethod, staticmethod)) else found


def installed_tree() -> Path:
    """The package folder of the SGLang in this environment; it is not imported."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise TargetMissingError("SGLang is not installed in this environment")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def known() -> dict[str, dict[str, str]]:
    """SGLang version -> target -> fingerprint: what this release of the plugin was written and tested for."""
    versions: dict[str, dict[str, str]] = json.loads(KNOWN_FILE.read_text(encoding="utf-8"))
    return versions


_DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _split(target: str, tree: Path) -> tuple[Path, list[str]]:
    """The file that holds ``target``, and the names to follow inside it."""
    head, *names = target.split(".")
    if head != "sglang":
        raise TargetMissingError(f"not a path inside sglang: {target}")
    folder = tree
    while names:
        name = names.pop(0)
        if (folder / f"{name}.py").is_file():
            return folder / f"{name}.py", names
        if not (folder / name).is_dir():  # folders without __init__.py are packages too
            if (folder / "__init__.py").is_file():
                return folder / "__init__.py", [name, *names]
            break
        folder = folder / name
    raise TargetMissingError(f"no module for it under {tree.name}/")


@cache
def _parsed(file: Path) -> tuple[str, ast.Module]:
    text = file.read_text(encoding="utf-8")
    return text, ast.parse(text)
