"""What the hold on pages counts on: when the real Mooncake gives up on a call, and that rows land after that."""

from __future__ import annotations

import time

import pytest
from servers import Pool, Receiver
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import MooncakeTransferEngine

from sglang_dcp_block.dcp.quarantine import VARIABLE, mooncake_timeout, needed_seconds

MIB = 2**20


@pytest.mark.parametrize("text", ["1", " +6s"])
def test_mooncake_gives_up_when_we_think_and_rows_land_after_that(tmp_path, monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)  # read when an engine is made
    engine, receiver = MooncakeTransferEngine("127.0.0.1"), Receiver(tmp_path, 64 * MIB)
    try:
        source, received = Pool.random(1, 1, 32 * MIB), receiver.pool(1, 1, 32 * MIB)
        assert engine.batch_transfer_sync(receiver.session, source.ptrs, received.ptrs, [1]) == 0, "connected"
        receiver.pause()
        began = time.monotonic()
        assert engine.batch_transfer_sync(receiver.session, source.ptrs, received.ptrs, [32 * MIB]) == -1
        took = time.monotonic() - began
        timeout = mooncake_timeout(text)
        assert timeout <= took < timeout + 4, "late by what a busy machine takes"
        assert (received.memory[0, 0, 1:] == 255).all()
        receiver.resume()
        deadline = began + needed_seconds(timeout)
        while (received.memory == 255).any() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (received.memory == source.memory).all(), "the call has failed, its rows have landed all the same"
    finally:
        receiver.close()
