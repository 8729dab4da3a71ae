"""``python -m sglang_dcp_block.transfer_model docs/transfer-model.md``: renew the tables of that page."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_dcp_block import made_tables
from sglang_dcp_block.transfer_model.tables import marked

PROGRAM = "python -m sglang_dcp_block.transfer_model"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    return made_tables.command(
        argv,
        program=PROGRAM,
        description="Renew the tables of modelled times in a page of the docs.",
        page="docs/transfer-model.md",
        tables=marked(),
    )


if __name__ == "__main__":
    raise SystemExit(main())
