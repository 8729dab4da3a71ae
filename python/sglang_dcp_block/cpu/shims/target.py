"""Replacing parts of SGLang, loudly: a target that is gone or has changed shape is an error, never a no-op.

A target is written ``package.module:Name`` or ``package.module:Class.method``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, ModuleType
from typing import Any

from sglang_dcp_block.refused import StartRefused


class ShimError(StartRefused, RuntimeError):
    """A shim does not fit the installed SGLang or the environment, or a server cannot run in it."""


def _sglang() -> str:
    try:
        return f"SGLang {version('sglang')}"
    except PackageNotFoundError:
        return "the installed SGLang"


def _import(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ShimError(f"{target}: expected in {_sglang()}, but its module cannot be imported: {error}") from error


def find(target: str) -> tuple[Any, str, Any]:
    """Look a target up.

    Args:
        target: ``package.module:Name`` or ``package.module:Class.method``.

    Returns:
        ``(owner, name, value)``: the module or class that holds it, its name there, and what it is.

    Raises:
        ShimError: it does not exist.

    Example:
        >>> find("string:Formatter.format")[1]
        'format'
    """
    module_name, _, path = target.partition(":")
    value: Any = _import(module_name, target)
    owner, name = value, ""
    for name in path.split("."):
        owner = value
        if not hasattr(owner, name):
            raise ShimError(f"{target}: expected in {_sglang()}, got nothing of that name")
        value = getattr(owner, name)
    return owner, name, value


def replace_function(target: str, new: Callable[..., Any]) -> None:
    """Put ``new`` in place of a function or method that takes the same parameters.

    Raises:
        ShimError: the target does not exist, or its parameters have other names than those of ``new``.
    """
    owner, name, old = find(target)
    got, expected = list(inspect.signature(old).parameters), list(inspect.signature(new).parameters)
    if got != expected:
        raise ShimError(f"{target}: expected parameters {expected}, got {got} in {_sglang()}")
    setattr(owner, name, new)


def _code_objects(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_objects(constant)


def shadow_global(module: str, name: str, value: Any, readers: tuple[str, ...]) -> None:
    """Give a global name of a module another value, after checking that the code meant still reads it.

    The name itself need not exist: a conditional import may have left it out.

    Args:
        module: dotted name.
        name: the global to set.
        value: what it becomes.
        readers: functions (``name`` or ``Class.method``) of that module which read the global.

    Raises:
        ShimError: a reader does not exist or does not read the name.
    """
    for reader in readers:
        function = inspect.unwrap(find(f"{module}:{reader}")[2])
        code = getattr(function, "__code__", None)
        if code is None or not any(name in part.co_names for part in _code_objects(code)):
            raise ShimError(f"{module}:{reader}: expected to read the global {name!r}, does not in {_sglang()}")
    setattr(_import(module, module), name, value)
