"""Entry point of the lab; see the package's docstring."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import torch

FOLDER = "DCP_BLOCK_LAB"

recording = False  # whether finished requests are kept for the next flush
released: list[dict] = []


def register() -> None:
    if FOLDER not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.flush_cache", on_flush, HookType.AROUND)
    HookRegistry.register("sglang.srt.mem_cache.common.release_kv_cache", on_release, HookType.BEFORE)
    if os.environ.get("DCP_BLOCK_LAB_MUTANTS"):
        from dcp_block_lab import mutants

        mutants.install()
    if os.environ.get("DCP_BLOCK_LAB_TRANSFERS"):
        from dcp_block_lab import transfers

        transfers.install()
    if os.environ.get("DCP_BLOCK_LAB_POISON"):
        from dcp_block_lab import poison

        poison.install()


def on_flush(original, scheduler, *args, **kwargs):
    folder = Path(os.environ[FOLDER])
    order = json.loads((folder / "order.json").read_text()) if (folder / "order.json").exists() else {}
    give_back_cached_pages(scheduler)
    before = snapshot(scheduler)  # SGLang's flush would refill the allocator, whatever was lost
    result = original(scheduler, *args, **kwargs)
    before["flushed"] = bool(getattr(result, "success", result))
    if order:
        obey(order)
    target = folder / f"state.{torch.distributed.get_rank()}.pt"
    torch.save(before, target.with_suffix(".part"))
    target.with_suffix(".part").rename(target)
    return result


def give_back_cached_pages(scheduler) -> None:
    """Evict the whole prefix cache: what the allocators then lack, nobody will ever free."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    host = host_pool(scheduler)
    if host is not None:
        scheduler.tree_cache.check_hicache_events()  # copies that are done still hold their pages until then
    scheduler.tree_cache.evict(EvictParams(num_tokens=scheduler.token_to_kv_pool_allocator.size))
    if host is not None:
        scheduler.tree_cache.evict_host(host.logical_size)


def host_pool(scheduler):
    """HiCache's pool of host memory, or None."""
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    return None if controller is None else controller.mem_pool_host.anchor_entry.host_pool


def obey(order: dict) -> None:
    global recording
    recording = bool(order.get("record"))
    if "block_size" in order:
        from sglang_dcp_block.dcp.layout import DcpLayout
        from sglang_dcp_block.patches import active

        active.activate(DcpLayout(active.layout().dcp_size, order["block_size"]))
    if "mutant" in order:
        from dcp_block_lab import mutants

        mutants.current = order["mutant"]


def snapshot(scheduler) -> dict:
    """What this scheduler's memory holds, as plain data and tensors."""
    import sglang
    from sglang.srt.runtime_context import get_parallel

    allocator, parallel = scheduler.token_to_kv_pool_allocator, get_parallel()
    state = {
        "sglang": sglang.__file__,
        "plugin": sorted(name for name in sys.modules if name.startswith("sglang_dcp_block.patches")),
        "dcp_rank": parallel.attn_dcp_rank,
        "dcp_size": parallel.attn_dcp_size,
        "virtual_page": allocator.page_size,
        "num_pages": allocator.size // allocator.page_size,
        "free_pages": sorted(allocator.get_all_free_pages().tolist()),
        "released": list(released),
        "sent": sent_so_far(),
    }
    if (host := host_pool(scheduler)) is not None:
        state["num_host_slots"] = host.logical_size
        state["free_host_slots"] = sorted(torch.cat([host.free_slots, *host.release_slots]).tolist())
    released.clear()
    return state


def sent_so_far() -> dict[str, tuple[int, int, int]]:
    """(transfers, segments, bytes) that this process has sent to decode ranks, by path; none where no plugin counts.

    Nothing is imported here: engines without the plugin are asked what they have loaded.
    """
    counters = sys.modules.get("sglang_dcp_block.patches.transfer_counts")
    if counters is None:
        return {}
    return {path: (t.transfers, t.segments, t.num_bytes) for path, t in counters.COUNTS.by_path.items()}


def on_release(req, tree_cache, *args, **kwargs) -> None:
    """BEFORE a finished request's rows go back: keep its tokens, its slots, and a copy of this rank's pool."""
    if not recording or not req.kv.holds_kv:
        return
    length = req.owned_kv_len()
    slots = tree_cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :length]
    pool = tree_cache.token_to_kv_pool_allocator.get_kvcache()
    buffers = getattr(pool, "k_buffer", None) or pool.kv_buffer
    released.append(
        {
            "tokens": [int(t) for t in [*req.origin_input_ids, *req.output_ids][:length]],
            "slots": slots.tolist(),
            "k": [buffer.clone() for buffer in buffers],
        }
    )


def switchable(point, is_off):
    """The same patch point with a hook that can be switched off while the engine runs."""
    from sglang_dcp_block.patches.register import Kind

    if point.kind not in (Kind.AROUND, Kind.REPLACE):
        return point
    hook, replaces = point.hook, point.kind is Kind.REPLACE

    def switched(original, *args, **kwargs):
        if is_off(point.target):
            return original(*args, **kwargs)
        return hook(*args, **kwargs) if replaces else hook(original, *args, **kwargs)

    return dataclasses.replace(point, kind=Kind.AROUND, hook=switched)
