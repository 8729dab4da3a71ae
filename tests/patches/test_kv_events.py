"""Cache events under DCP carry virtual pages, with and without blocks, and that is the size which SGLang advertises."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest

from paged_server import PagedServer, Request


@pytest.mark.parametrize(("page_size", "dcp_size"), [(64, 8), (16, 2), (4, 1)])
def test_events_are_of_the_size_that_is_advertised(page_size: int, dcp_size: int) -> None:
    """A router that hashed prompts by physical pages would find none of these events."""
    from sglang.srt.arg_groups.overrides import kv_event_block_size_of
    from sglang.srt.disaggregation.kv_events import BlockStored

    advertised = kv_event_block_size_of(SimpleNamespace(page_size=page_size, dcp_size=dcp_size))
    assert advertised == page_size * dcp_size
    server = PagedServer(8, advertised, 8 * advertised, with_events=True)
    request = Request(0, array("q", range(2 * advertised + advertised // 2 + 1)))
    server.admit(request)
    assert server.extend([request], [len(request.prompt)])
    server.release(request, keep=True)
    stored = [event for event in server.tree.take_events() if isinstance(event, BlockStored)]
    assert {event.block_size for event in stored} == {advertised}
    assert sum(len(event.block_hashes) for event in stored) == 2
    assert [token for event in stored for token in event.token_ids] == list(range(2 * advertised))
