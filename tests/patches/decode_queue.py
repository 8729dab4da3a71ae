"""A decode server's queue around SGLang's real method that asks prefill servers, without the rest of the server."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

from sglang_dcp_block.patches import pd_decode


class Queue:
    """A decode queue whose manager finds every prefill server it is asked for."""

    def __init__(self, error: Exception | None = None):
        self._ensure_last_attempt_time, self._ensure_retry_count = {}, {}
        self._ensure_retry_interval, self._max_ensure_retries = 0.0, 3
        self.transfer_queue = SimpleNamespace(deferred_kv_release_timeout=40.0)
        table: dict[str, object] = {}

        def find(address: str) -> bool:
            if error is not None:
                raise error
            table[address] = object()
            return True

        self.kv_manager = SimpleNamespace(
            prefill_info_table=table, try_ensure_parallel_info=find, kv_args=SimpleNamespace(page_size=8)
        )

    def ask(self, *addresses: str):
        """(ready addresses, reasons of failed requests by address), with one request an address."""
        from sglang.srt.disaggregation.decode import DecodePreallocQueue

        reasons: dict[str, str] = {}
        original = inspect.unwrap(DecodePreallocQueue._ensure_prefill_info)
        ready, remaining = pd_decode.ask_prefill_first(
            original, self, {a: [self.request(a, reasons)] for a in addresses}
        )
        assert remaining == []
        return list(ready), reasons

    def request(self, address: str, reasons: dict[str, str]):
        manager = SimpleNamespace(
            record_failure=lambda room, reason: reasons.update({address: reason}),
            update_status=lambda room, status: None,
        )
        return SimpleNamespace(kv_receiver=SimpleNamespace(kv_mgr=manager, bootstrap_room=1, conclude_state=None))
