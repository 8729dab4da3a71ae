"""Triton kernels of the block layout: one kernel, its launcher and its torch twin a file.

    device            the layout's maps as device functions, proved equal to ``dcp/layout.py`` by a test
    launch            what the launchers share: which machine runs a kernel, grid sizes, argument checks
    slot_maps         slot -> placed slot at the write door, and slot -> row
    kv_indices        this rank's rows of a batch, read from ``req_to_token``
    compact_indices   this rank's slots of a batch, picked from a stream of all slots
    neutralise        what a rank without KV contributes to a merge
    group_pages       a prefill server's free pages, in the order of decode ranks
    long_runs         its free pages after a merge, those in long runs first
    free_runs         a decode server's free pages, those with the fewest gaps first (plain torch)

A launcher runs its kernel on CUDA tensors, and on CPU tensors under ``TRITON_INTERPRET=1``; otherwise the torch twin
(``*_torch``), which is also the reference for tests and benchmarks.  Launchers allocate at most their result, launch at
most once, never read device data on the host, and take their grid from shapes alone: they may be captured in a CUDA
graph, given an ``out`` whose address stays.
"""
