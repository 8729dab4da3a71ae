"""``python -m sglang_dcp_block.patches``: look at the patch points, or write the files that are made from them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sglang_dcp_block.patches import fingerprint, register
from sglang_dcp_block.patches.register import PatchPoint


def main(argv: list[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_dcp_block.patches",
        description="Check the patch points against the installed SGLang, or write their table.",
        epilog="examples:\n  python -m sglang_dcp_block.patches\n  python -m sglang_dcp_block.patches --docs "
        "docs/patch-points.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the Markdown table of the patch points")
    parser.add_argument(
        "--learn",
        action="store_true",
        help="record the installed SGLang's fingerprints as known (maintainers, after review)",
    )
    args = parser.parse_args(argv)
    try:
        points = all_points()
    except ModuleNotFoundError as error:
        parser.error(
            f"expected {error.name} in this Python, got none: run it in the environment that SGLang is installed in"
        )
    if args.learn:
        learn()
    if args.docs:
        try:
            args.docs.write_text(as_markdown(), encoding="utf-8")
        except OSError as error:
            parser.error(f"--docs: cannot write {args.docs} ({error.strerror})")
    try:
        register.check(points)
    except register.PatchError as error:
        print(error)
        return 1
    print(f"{len(points)} patch points fit SGLang {register.upstream_version()}.")
    return 0


def all_points() -> tuple[PatchPoint, ...]:
    """The register; its hooks import torch and Triton."""
    from sglang_dcp_block.patches import points

    return points.all_points()


def learn() -> None:
    """Write the installed SGLang's fingerprints into the file of known ones."""
    tree = fingerprint.installed_tree()
    known = dict(fingerprint.known())
    known[register.upstream_version()] = {p.target: fingerprint.from_tree(p.target, tree) for p in all_points()}
    fingerprint.KNOWN_FILE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    fingerprint.known.cache_clear()


def as_markdown() -> str:
    """The register as a Markdown page."""
    lines = [
        "# Patch points",
        "",
        "Made by `make docs` from `python/sglang_dcp_block/patches/*_points.py`; do not edit.",
        "",
        "Kinds: *after*, *around* and *replace* are SGLang's `HookRegistry` types; *relies* is not touched, but its source",
        "must be the known one. Known SGLang versions: " + ", ".join(sorted(fingerprint.known())) + ".",
        "",
        "| target | kind | why | removed by |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{p.target}` | {p.kind.value} | {p.why} | {p.removed_by} |" for p in all_points()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
