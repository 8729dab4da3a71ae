"""The all-gather plan and the local share of streams, against tokens dealt one by one."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from sglang_dcp_block.dcp.gather import local_share, plan_gather, to_device
from sglang_dcp_block.dcp.layout import DcpLayout

parts = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 100)), min_size=1, max_size=4)


def stream(lens, starts):
    """(request, position) of every token of the stream."""
    return [(i, t) for i, (n, s) in enumerate(zip(lens, starts, strict=True)) for t in range(s, s + n)]


@given(parts, st.integers(1, 8), st.integers(1, 20))
def test_gathered_shares_come_back_in_order(requests, dcp_size, block):
    lens, starts = [n for n, _ in requests], [s for _, s in requests]
    plan = plan_gather(lens, starts, DcpLayout(dcp_size, block))
    received = []
    for rank in range(dcp_size):
        own = [(i, t) for i, (n, s) in enumerate(requests) for t in reference.tokens_of(rank, n, dcp_size, block, s)]
        assert len(own) == plan.sent[rank]
        received += own + [("pad", rank)] * (plan.padded - len(own))
    assert [received[i] for i in plan.order.tolist()] == stream(lens, starts)
    assert plan.padded == max(plan.sent), "a rank may not send more than it must"


@given(parts, st.integers(1, 8), st.integers(1, 20))
def test_local_shares_partition_the_stream(requests, dcp_size, block):
    lens, starts = [n for n, _ in requests], [s for _, s in requests]
    everything = stream(lens, starts)
    for rank in range(dcp_size):
        own = [everything[i] for i in local_share(lens, starts, rank, DcpLayout(dcp_size, block)).tolist()]
        assert own == [
            (i, t) for i, (n, s) in enumerate(requests) for t in reference.tokens_of(rank, n, dcp_size, block, s)
        ]


def test_no_prefix_anywhere_sends_nothing():
    plan = plan_gather([0, 0], [0, 64], DcpLayout(8, 64))
    assert (plan.padded, plan.sent, plan.order.numel()) == (0, (0,) * 8, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.bfloat16])
def test_gather_hook_moves_every_type(dtype, monkeypatch):
    """The hook on all ranks at once, over an all-gather made of lists."""
    import sglang.srt.runtime_context as context

    from sglang_dcp_block.patches import active, mla_gather

    layout, lens, starts = DcpLayout(3, 4), torch.tensor([17, 5]), torch.tensor([2, 0])
    monkeypatch.setattr(active, "_layout", layout)
    whole = torch.randn(int(lens.sum()), 1, 6).to(dtype)
    shares = [whole[local_share(lens.tolist(), starts.tolist(), r, layout)] for r in range(3)]
    sent: list[torch.Tensor] = []

    class Group:
        def all_gather_into_tensor(self, out, own):
            sent.append(own.clone())
            if len(sent) == 3:
                out.copy_(torch.cat(sent))

    for rank in range(3):
        parallel = type("P", (), {"dcp_enabled": True, "dcp_rank": rank, "dcp_group": Group()})()
        monkeypatch.setattr(context, "get_parallel", lambda parallel=parallel: parallel)
        got = mla_gather.gather_prefix(shares[rank][..., :4], shares[rank][..., 4:], lens, starts)
    assert torch.equal(got.view(torch.uint8), whole.view(torch.uint8))
    assert len({s.shape for s in sent}) == 1, "every rank sends equally much"


def test_copies_to_a_gpu_do_not_wait_for_it():
    numbers = Mock()
    there = to_device(numbers, "cuda:0")
    numbers.pin_memory.return_value.to.assert_called_once_with("cuda:0", non_blocking=True)
    assert there is numbers.pin_memory.return_value.to.return_value
    here = torch.arange(3)
    assert to_device(here, here.device).tolist() == [0, 1, 2], "and memory of the host needs no pinning"


def test_gather_hook_refuses_a_wrong_share(monkeypatch):
    import sglang.srt.runtime_context as context

    from sglang_dcp_block.patches import active, mla_gather

    monkeypatch.setattr(active, "_layout", DcpLayout(2, 4))
    parallel = type("P", (), {"dcp_enabled": True, "dcp_rank": 0, "dcp_group": None})()
    monkeypatch.setattr(context, "get_parallel", lambda: parallel)
    with pytest.raises(RuntimeError, match=r"expected 4 prefix rows .* got 3"):
        mla_gather.gather_prefix(torch.zeros(3, 1, 2), torch.zeros(3, 1, 1), torch.tensor([8]), torch.tensor([0]))
