"""Faults put into the armed plugin on purpose: the suite must see each of them."""

from __future__ import annotations

# "off:<last part of a target>", "door:<fault>", "leak", "host:<fault>", "sent:nothing", or None
current: str | None = None


def install() -> None:
    """Make every patch point and the write door switchable; before anything is armed."""
    from dcp_block_lab.plugin import switchable
    from sglang_dcp_block.patches import points, write_door

    points.KV_POINTS = tuple(switchable(p, is_off) for p in points.KV_POINTS)
    write_door.place_slots = faulty_door(write_door.place_slots)
    leak_pages()
    spoil_host_tier()
    send_nothing()


def is_off(target: str) -> bool:
    return current == f"off:{target.rpartition('.')[2]}"


def faulty_door(place_slots):
    import torch

    def door(slots, layout):
        size = layout.dcp_size
        placed = place_slots(slots, layout)
        row, owner = placed // size, placed % size
        if current == "door:off":
            return slots
        if current == "door:owner+1":
            return row * size + torch.where(slots == 0, owner, (owner + 1) % size)
        if current == "door:rows-swapped":
            return torch.where(slots == 0, row, row ^ 1) * size + owner
        return placed

    return door


def leak_pages() -> None:
    """Under the mutant "leak", the allocator forgets the first page of everything that is freed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def forget_one(original, allocator, indices, *args, **kwargs):
        if current == "leak" and indices.numel() > 0:
            pages = indices // allocator.page_size
            indices = indices[pages != pages[0]]
        return original(allocator, indices, *args, **kwargs)

    for method in ("free", "free_segment"):
        target = f"sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.{method}"
        HookRegistry.register(target, forget_one, HookType.AROUND)


def spoil_host_tier() -> None:
    """Faults of HiCache's host tier.

    Under "host:rows-swapped", neighbouring rows change places on their way back, under "host:not-loaded" they stay there,
    and under "host:leak" the pool forgets the first page of everything that is freed.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def load_badly(original, pool, device_pool, host_indices, device_indices, *args, **kwargs):
        if current == "host:rows-swapped":
            device_indices = device_indices.view(-1, 2).flip(-1).reshape(-1)
        if current != "host:not-loaded":
            original(pool, device_pool, host_indices, device_indices, *args, **kwargs)

    def forget_one(original, pool, indices, *args, **kwargs):
        if current == "host:leak" and indices.numel() > 0:
            indices = indices[pool.logical_page_size :]
        return original(pool, indices, *args, **kwargs)

    pools = "sglang.srt.mem_cache.pool_host"
    load = f"{pools}.mla.MLATokenToKVPoolHost.load_to_device_per_layer"
    HookRegistry.register(load, load_badly, HookType.AROUND)
    HookRegistry.register(f"{pools}.base.HostKVCache.free", forget_one, HookType.AROUND)


def send_nothing() -> None:
    """Under the mutant "sent:nothing", blocks are planned, none is handed over to Mooncake, and success is reported."""
    from sglang_dcp_block.patches import mooncake_send

    hand_over = mooncake_send._hand_over

    def succeed(*args, **kwargs):
        return 0 if current == "sent:nothing" else hand_over(*args, **kwargs)

    mooncake_send._hand_over = succeed
