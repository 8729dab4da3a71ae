"""Patch points of HiCache: KV that goes to host memory and comes back, and from there to storage."""

from __future__ import annotations

from sglang_dcp_block.patches import host_cache
from sglang_dcp_block.patches.register import Kind, PatchPoint

_CONTROLLER = "sglang.srt.managers.cache_controller"
_POOL = "sglang.srt.mem_cache.pool_host"

# In every scheduler with HiCache.  Pages of full virtual pages need no change: see what is relied on.
HOST_POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        f"{_CONTROLLER}.storage_model_name", Kind.AFTER,
        "Pages in storage are named with the block size; otherwise servers of other layouts would read them.",
        "the block size in HiCacheStorageConfig", host_cache.name_layout,
    ),
    PatchPoint(
        f"{_CONTROLLER}.HiCacheController.attach_storage_backend", Kind.AROUND,
        "A running server can be told to attach storage that was refused at start.",
        "the block size in HiCacheStorageConfig", host_cache.attach_tried_storage,
    ),
    *(
        PatchPoint(target, Kind.RELIES, why, "nothing: watched for changes")
        for target, why in (
            (f"{_POOL}.mla.MLATokenToKVPoolHost.backup_from_device_all_layer",
             "Moves whole virtual pages, and takes this rank's rows of them from maybe_dcp_kernel_indices."),
            (f"{_POOL}.mla.MLATokenToKVPoolHost.load_to_device_per_layer",
             "Moves whole virtual pages, and takes this rank's rows of them from maybe_dcp_kernel_indices."),
            (f"{_POOL}.base.HostKVCache", "Hands out host slots by whole virtual pages, in order."),
            (f"{_CONTROLLER}.HiCacheController.move_indices", "Keeps the slots of a virtual page together and in order."),
            (f"{_CONTROLLER}.HiCacheController._generate_storage_config", "Names pages through storage_model_name."),
            ("sglang.srt.mem_cache.hicache_storage.HiCacheFile.__init__",
             "Names files with the model name, the page size and the DCP rank."),
        )
    ),
)  # fmt: skip
