"""The write door: where slots become the ids that KV writes use.

``req_to_token`` keeps slots in position order.  Once an iteration, SGLang's ``KVLocPlan`` binds the batch's write ids
through the FULL pool's ``IdSpace``; ours maps slot v to ``row(v) * P + owner(v)``, so every write kernel's own rule
(``id % P`` is the owner, ``id // P`` the row) stays right unchanged.
"""

from __future__ import annotations

from typing import Any

from sglang_dcp_block.kernels.slot_maps import place_slots
from sglang_dcp_block.patches.active import layout


def open_write_door(result: None, translator: Any, *, is_draft_worker: bool = False, **_: Any) -> None:
    """AFTER ``KVIndexTranslator.__init__``: give the target model's FULL pool our write map.

    Draft pools are replicated over the ranks and indexed by slots as they are.
    """
    from sglang.srt.mem_cache.kv_loc_plan import IdSpace, IdSpaceKind

    if is_draft_worker:
        return
    if translator.is_translating:
        raise RuntimeError(
            "expected a static KV pool, got one that translates ids: start without --enable-unified-memory"
        )
    translator._spaces[IdSpaceKind.FULL] = IdSpace(key=(IdSpaceKind.FULL, "dcp-block"), write=write_ids)


def write_ids(slots: Any) -> Any:
    """Slots of an iteration's write window -> placed ids; same shape and dtype, one launch. Slot 0, the sink, stays 0."""
    return place_slots(slots, layout())
