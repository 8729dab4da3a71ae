"""What of the plugin goes when a commit of the series is merged: a table made from the register of patch points.

``python -m upstream.removals docs/upstreaming.md`` renews it in place; ``--check`` only says whether it is up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sglang_dcp_block import made_tables
from sglang_dcp_block.patches.points import all_points
from sglang_dcp_block.patches.register import PatchPoint
from upstream import commit

PROGRAM = "python -m upstream.removals"
BEGIN = "<!-- begin: made from the register by `make docs`; do not edit -->"
WATCHED = "nothing: watched for changes"
EVERYTHING = "all of them"
NOT_IN_SERIES = "none: left out of the series"

# A condition of the register -> the commits that meet it, as series/name without its number.
MET_BY: dict[str, tuple[str, ...] | str] = {
    "a field for the block size in upstream's Parallel arguments": ("blocks/flag",),
    "native blocks: nothing to arm": EVERYTHING,
    "native blocks: there is no plugin that could be missing in one process": EVERYTHING,
    "interleave_size passed through upstream's DCP layout on CUDA, as on NPU": (
        "blocks/layout", "blocks/triton", "blocks/mla",
    ),
    "native blocks: the plan has localized what a fused write takes": ("blocks/triton",),
    "the same guard in upstream's backend": ("blocks/mla",),
    "a mask in FlashInfer's cute-dsl kernel that knows blocks, or none for one query token": ("blocks/mla",),
    "MLA under DCP in upstream's Triton backend": ("triton_mla/triton_mla",),
    "the same guards in upstream's bootstrap thread": ("blocks/pd_reject",),
    "a field in PrefillServerInfo and a positional frame for the block size": ("blocks/pd_blocks",),
    "interleave_size in upstream's transfer plan, planned by runs": ("blocks/pd_blocks",),
    "bounded batches in upstream's send_kvcache_dcp, as in its page copy": ("blocks/pd_blocks",),
    "the block size in HiCacheStorageConfig": NOT_IN_SERIES,
    "sends that stop between batches in upstream": NOT_IN_SERIES,
    "an order of pages by decode rank in upstream's allocator": NOT_IN_SERIES,
    "a release timeout in upstream that follows the transfer engine's": NOT_IN_SERIES,
    "a heartbeat in upstream that tells a restarted prefill server from one that lived on": NOT_IN_SERIES,
}  # fmt: skip


def table(points: Iterable[PatchPoint], subjects: dict[str, str]) -> str:
    """One row a condition, as Markdown: the condition, the commits that meet it, the patch points that go then.

    Args:
        points: of the register.
        subjects: series/name without its number -> subject, of every commit.
    Raises:
        KeyError: a condition that nobody has sorted, or a commit that is not in the series.
    """
    conditions: dict[str, list[PatchPoint]] = {}
    for point in points:
        conditions.setdefault(point.removed_by, []).append(point)
    watched = len(conditions.pop(WATCHED, []))
    lines = ["| condition | commits | patch points that go |", "|---|---|---|"]
    for condition, group in conditions.items():
        met_by = MET_BY[condition]
        commits = met_by if isinstance(met_by, str) else "; ".join(subjects[name] for name in met_by)
        lines.append(f"| {condition} | {commits} | {', '.join(f'`{_short(p.target)}`' for p in group)} |")
    lines += ["", f"{watched} more are only watched for changes; each goes with the last hook that counts on it."]
    return "\n".join(lines) + "\n"


def subjects() -> dict[str, str]:
    """Every commit of every series, by series/name without its number."""
    return {
        f"{series}/{re.sub(r'^c[0-9]+_', '', one.name)}": one.subject
        for series in commit.ALL
        for one in commit.load(series)
    }


def tables() -> made_tables.Tables:
    """The page's one table, by its marker."""
    return {BEGIN: lambda: table(all_points(), subjects())}


def _short(target: str) -> str:
    *_, owner, name = target.split(".")
    return f"{owner}.{name}" if owner[:1].isupper() else name


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    return made_tables.command(
        argv,
        program=PROGRAM,
        description="Renew the table of what goes when a commit is merged.",
        page="docs/upstreaming.md",
        tables=tables(),
    )


if __name__ == "__main__":
    raise SystemExit(main())
