"""A prefill server's transfer manager without the server around it, and the decode ranks that it sends to.

The manager is SGLang's own class with the attributes that sending needs, so upstream's code runs, and the hooks around it.
The decode side is memory: of this process (:class:`MemoryEngine`), or of another one behind real Mooncake.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

ROOM = 7


class MemoryEngine:
    """A transfer engine inside one process. Counts what each call hands over, and can fail one."""

    def __init__(self, fail_call: int | None = None) -> None:
        self.calls: list[int] = []  # segments
        self.fail_call = fail_call

    def batch_transfer_sync(self, session: str, src: list[int], dst: list[int], lengths: list[int]) -> int:
        self.calls.append(len(lengths))
        if len(self.calls) - 1 == self.fail_call:
            return -1
        for source, destination, length in zip(src, dst, lengths, strict=True):
            ctypes.memmove(destination, source, length)
        return 0


class CountingEngine:
    """Mooncake behind SGLang's wrapper, counted at the call."""

    def __init__(self, engine: Any) -> None:
        self.real = engine
        self.engine = engine.engine  # as SGLang's wrapper has it
        self.calls: list[int] = []

    def batch_transfer_sync(self, session: str, src: list[int], dst: list[int], lengths: list[int]) -> int:
        self.calls.append(len(lengths))
        return self.real.batch_transfer_sync(session, src, dst, lengths)


@dataclass
class Pool:
    """KV buffers of one server: ``[num_layers, rows, row_bytes]``, each layer at its own address."""

    memory: np.ndarray
    base: int | None = None  # its address in the process that it is registered in

    @property
    def ptrs(self) -> list[int]:
        base = self.memory.ctypes.data if self.base is None else self.base
        return [base + layer * self.memory.strides[0] for layer in range(len(self.memory))]

    @property
    def row_bytes(self) -> int:
        return self.memory.shape[2]

    @classmethod
    def random(cls, layers: int, rows: int, row_bytes: int, seed: int = 0) -> Pool:
        """No two rows alike, nor any like :meth:`blank`."""
        rng = np.random.default_rng(seed)
        return cls(rng.integers(0, 200, (layers, rows, row_bytes), dtype=np.uint8))

    @classmethod
    def blank(cls, layers: int, rows: int, row_bytes: int) -> Pool:
        return cls(np.full((layers, rows, row_bytes), 255, np.uint8))


@dataclass
class Registration:
    """What SGLang keeps of a decode rank, as far as sending reads it."""

    dst_dcp_size: int
    dst_dcp_rank: int
    dcp_block_size: int
    dst_kv_ptrs: list[int]
    requires_dcp_relayout: bool = True
    mooncake_session_id: str = "session"
    dst_kv_layer_ids: list[int] = field(default_factory=list)
    dst_kv_item_lens: list[int] = field(default_factory=list)
    dst_tp_rank: int = 0
    dst_attn_tp_size: int | None = None
    dcp_token_item_lens: list[int] | None = None
    dst_aux_ptrs: list[int] = field(default_factory=list)


def make_manager(pool: Pool, page_size: int, engine: Any, drafts: Pool | None = None, **changes: Any) -> Any:
    """A prefill server's manager with one transfer queue a worker, over ``pool`` and a draft model's pool."""
    manager = object.__new__(MooncakeKVManager)
    pools = [pool, *([drafts] if drafts else [])]
    widths = [p.row_bytes for p in pools for _ in p.ptrs]
    manager.kv_args = SimpleNamespace(
        page_size=page_size,
        kv_data_ptrs=[ptr for p in pools for ptr in p.ptrs],
        kv_item_lens=[width * page_size for width in widths],
        kv_layer_ids=[],
        num_draft_entries=len(drafts.ptrs) if drafts else 0,
        prefill_start_layer=0,
        engine_rank=0,
        state_types=[],
    )
    manager.engine = engine
    manager.is_mla_backend, manager.is_hybrid_mla_backend = drafts is None, drafts is not None
    manager.attn_tp_size = 1
    manager.enable_custom_mem_pool = False
    manager.enable_deferred_decode_kv_release = False
    manager.max_transfer_batch_indices = 0
    manager.transfer_queues = [None] * 4
    manager.executors = []
    manager.decode_kv_args_table, manager.transfer_infos, manager.request_status = {}, {}, {ROOM: KVPoll.Transferring}
    manager.session_failures, manager.failed_sessions = defaultdict(int), set()
    manager.session_lock, manager.failure_lock = threading.Lock(), threading.Lock()
    manager.failure_records = {}
    manager._dcp_pack_buffers = manager._dcp_pack_max_tokens = None
    for name, value in changes.items():
        setattr(manager, name, value)
    return manager


def send(
    manager: Any,
    registration: Registration,
    src_pages: list[int],
    dst_pages: list[int],
    *,
    num_tokens: int | None,
    skipped_pages: int = 0,
    prefix: int = 0,
    pack_buffer: Any = None,
    executor: ThreadPoolExecutor | None = None,
) -> int:
    """One chunk of :data:`ROOM`, called as SGLang's transfer worker calls it."""
    page_size = manager.kv_args.page_size
    registration.dcp_token_item_lens = [length // page_size for length in manager.kv_args.kv_item_lens]
    session, pages = registration.mooncake_session_id, np.array(dst_pages, np.int32)
    manager.decode_kv_args_table[session] = registration
    manager.transfer_infos.setdefault(ROOM, {})[session] = SimpleNamespace(dst_kv_indices=pages, is_dummy=False)
    return manager.send_kvcache_dcp(
        session,
        np.array(src_pages, np.int32),
        registration.dst_kv_ptrs,
        pages,
        dcp_token_item_lens=registration.dcp_token_item_lens,
        dst_dcp_size=registration.dst_dcp_size,
        dst_dcp_rank=registration.dst_dcp_rank,
        src_page_offset=skipped_pages,
        decode_prefix_len=prefix,
        num_kv_tokens=num_tokens,
        executor=executor,
        dst_layer_ids=registration.dst_kv_layer_ids,
        pack_buffer=pack_buffer,
        dst_kv_item_lens=registration.dst_kv_item_lens,
        dst_tp_rank=registration.dst_tp_rank,
        dst_attn_tp_size=registration.dst_attn_tp_size,
    )


class Receiver:
    """Memory of another process, registered with real Mooncake; this process sees what arrives in it."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        path = folder / "memory"
        path.write_bytes(b"")
        os.truncate(path, num_bytes)
        self.memory = np.memmap(path, np.uint8, "r+")
        self.log = folder / "receiver.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("receiver.py")), str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        if not (line := self.process.stdout.readline()):
            raise self._ended()
        self.session, address = line.split()
        self.address = int(address)
        self._used, self.killed = 0, False

    def pool(self, layers: int, rows: int, row_bytes: int) -> Pool:
        """A blank pool in this memory; memory runs out, pools are not returned."""
        first, size = self._used, layers * rows * row_bytes
        self._used += size
        assert self._used <= len(self.memory), "the receiver's memory is too small for this test"
        view = self.memory[first : first + size].reshape(layers, rows, row_bytes)
        view[:] = 255
        return Pool(view, self.address + first)

    def reset(self) -> None:
        """Forget all pools."""
        self._used = 0

    def pause(self) -> None:
        """Stop the process; on return none of its threads runs, so nothing more arrives."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # a signal is only pending until the kernel has stopped each thread

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process, at once."""
        self.killed = True
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        """End the process, unless it was killed.

        Raises:
            RuntimeError: it had ended by itself.
        """
        if not self.killed and self.process.poll() is not None:
            raise self._ended()
        self.kill()

    def _ended(self) -> RuntimeError:
        status = self.process.wait()
        self.process.communicate()
        last = self.log.read_text(errors="replace")[-2000:]
        return RuntimeError(
            f"expected the receiver to live until closed, got exit status {status}; its last words: {last}"
        )
