"""Reads: from a slot to the row that holds its KV on the owner."""

from __future__ import annotations

from typing import Any

from sglang_dcp_block.kernels.slot_maps import slot_rows
from sglang_dcp_block.patches.active import layout


def read_rows(original: Any, translator: Any, widened_ids: Any) -> Any:
    """AROUND ``KVIndexTranslator.translate_dcp_read_ids``: slots of this rank's share -> rows, same shape and dtype."""
    return slot_rows(widened_ids, layout())
