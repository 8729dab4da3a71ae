"""``python -m sglang_dcp_block.doctor.resolve FILE``: what SGLang makes of a command line, in a process of its own.

Reads the flags as a JSON list from standard input, resolves them as ``sglang serve`` does, with plugins loaded, and writes
the outcome to FILE as JSON.  Starts nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

FIELDS = (
    "dcp_size",
    "tp_size",
    "page_size",
    "kv_cache_dtype",
    "disaggregation_mode",
    "disaggregation_transfer_backend",
    "disaggregation_bootstrap_port",
    "host",
    "port",
)


class _Warnings(logging.Handler):
    """Collects what the plugin says at warning level or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def outcome_of(argv: list[str]) -> dict[str, Any]:
    """What a command line resolves to, or ``error``: the text that the server would end with."""
    warnings, stderr = _Warnings(), io.StringIO()
    logging.getLogger("sglang_dcp_block").addHandler(warnings)
    outcome: dict[str, Any] = {"warnings": warnings.lines}
    try:
        with contextlib.redirect_stderr(stderr):
            outcome |= _resolved(argv)
    except SystemExit:  # argparse
        lines = stderr.getvalue().strip().splitlines()
        outcome["error"] = lines[-1] if lines else "the flags could not be read"
    except Exception as error:  # whatever SGLang raises is what the server would end with
        outcome["error"] = str(error) or type(error).__name__
        outcome["kind"] = type(error).__name__
    return outcome


def _resolved(argv: list[str]) -> dict[str, Any]:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.arg_groups.model_override_base import attention_backends_of
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    from sglang_dcp_block.patches.flag import armed_block_size, armed_group_pages

    record = prepare_server_args(argv)
    record.resolve_once()
    view = resolving_view(record)
    return {
        **{name: getattr(view, name) for name in FIELDS},
        "backends": list(attention_backends_of(view)),
        "block_size": armed_block_size(record),
        "group_pages": armed_group_pages(record),
    }


def main() -> int:
    """Command line entry point; returns 0 whatever came of the flags."""
    outcome = outcome_of(json.load(sys.stdin))
    Path(sys.argv[1]).write_text(json.dumps(outcome, default=str), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
