"""A commit of a series, as data: a folder of ``series`` with its message, its edits and the files it adds."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path

from upstream.edit import Edit

SERIES = Path(__file__).parent / "series"
BLOCKS, TRITON_MLA = "blocks", "triton_mla"
ALL = (BLOCKS, TRITON_MLA)  # in the order in which they stack


@dataclass(frozen=True)
class Commit:
    """One commit: one idea, which compiles and passes its own tests."""

    name: str  # of its folder
    subject: str
    message: str  # the body, wrapped at 72 columns
    edits: tuple[Edit, ...]
    files: Path  # a folder of new files at their paths in upstream's repository; may be absent
    pages: tuple[tuple[str, str, str], ...] = ()  # (path, text, new text): in pages that earlier commits add

    def edits_by_module(self) -> dict[str, list[Edit]]:
        """The edits of each module, in order."""
        found: dict[str, list[Edit]] = {}
        for edit in self.edits:
            found.setdefault(edit.module, []).append(edit)
        return found

    def new_files(self) -> list[str]:
        """Paths in upstream's repository that this commit adds."""
        return sorted(str(f.relative_to(self.files)) for f in self.files.rglob("*") if f.is_file() and _is_source(f))


def load(series: str) -> tuple[Commit, ...]:
    """The commits of a series, in order: the folders ``c01_...``, ``c02_...`` of ``upstream/series/<series>``."""
    names = sorted(module.name for module in pkgutil.iter_modules([str(SERIES / series)]) if module.ispkg)
    return tuple(_load(series, name) for name in names)


def _load(series: str, name: str) -> Commit:
    module = importlib.import_module(f"upstream.series.{series}.{name}")
    message: str = module.MESSAGE.strip()
    subject, _, rest = message.partition("\n")
    files, pages = SERIES / series / name / "files", tuple(getattr(module, "PAGES", ()))
    return Commit(name, subject, rest.strip(), tuple(module.EDITS), files, pages)


def _is_source(file: Path) -> bool:
    return "__pycache__" not in file.parts
