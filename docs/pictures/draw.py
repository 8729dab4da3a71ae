"""``python docs/pictures/draw.py``: write the pictures of the docs.  ``--check`` only says whether they are up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import dealing
import merge
import slots

HERE = Path(__file__).parent
PICTURES: dict[str, Callable[[], str]] = {
    "token-round-robin.svg": lambda: dealing.picture(1),
    "block-round-robin.svg": lambda: dealing.picture(4),
    "position-slot-row.svg": slots.picture,
    "merge.svg": merge.picture,
}


def main(argv: list[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    cli = argparse.ArgumentParser(prog="python docs/pictures/draw.py", description="Write the pictures of the docs.")
    cli.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a picture is out of date")
    check = cli.parse_args(argv).check
    old = [name for name, draw in PICTURES.items() if _text(HERE / name) != draw()]
    for name in old:
        if check:
            print(f"docs/pictures/{name} is out of date. Run: make docs")
        else:
            (HERE / name).write_text(PICTURES[name](), encoding="utf-8")
    return int(check and bool(old))


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
