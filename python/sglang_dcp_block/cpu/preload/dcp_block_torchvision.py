"""Operator schemas that torchvision's import looks for and a CUDA build of it cannot register beside CPU torch.

SGLang imports torchvision.  The wheel on PyPI is a CUDA build, whose native library does not load without CUDA.
torchvision shrugs that off, but its ``_meta_registrations`` then stops with "operator torchvision::nms does not exist".
Schemas alone are enough for the import; calling the operators still fails, and nothing here does.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

_library: object = None  # torch drops the schemas when this is collected


def define_missing() -> None:
    """Define those of :data:`SCHEMAS` that no loaded library has."""
    global _library
    import torch

    missing = [schema for name, schema in SCHEMAS.items() if not hasattr(torch.ops.torchvision, name)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in missing:
            library.define(schema)  # type: ignore[no-untyped-call]
        _library = library


class _BeforeMetaRegistrations(importlib.abc.MetaPathFinder):
    """Finds nothing; acts when torchvision has tried its native library and is about to need the schemas."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision._meta_registrations":
            define_missing()
        return None


def install() -> None:
    """Watch for torchvision's import, once."""
    if not any(isinstance(finder, _BeforeMetaRegistrations) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BeforeMetaRegistrations())
