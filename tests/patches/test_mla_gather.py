"""The all-gather of a sharded prefix, all ranks in one process: every byte of the KV arrives, in position order."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from ranks import Group, on_all_ranks
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.patches import active, mla_gather

LATENT, ROPE = 6, 2
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(scope="module")
def parallel():
    """SGLang's parallel state, of the rank that runs."""
    import sglang.srt.runtime_context as context

    here = threading.local()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "get_parallel", lambda: here.state)
        yield here


class Wire(Group):
    """Keeps the types of what travels."""

    types: set[torch.dtype]

    def all_gather_into_tensor(self, output, tensor):
        self.types.add(tensor.dtype)
        assert output.dtype == tensor.dtype
        super().all_gather_into_tensor(output, tensor)


def random_bits(tokens: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[tokens, 1, LATENT + ROPE] of any bits, NaN included."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    shape = (tokens, 1, (LATENT + ROPE) * size)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8).view(dtype)


def gathered(parallel, size: int, block: int, lens: list[int], starts: list[int] | None, dtype: torch.dtype, seed: int):
    """(KV of all parts in order, what each rank gets, the types on the wire)"""
    kv = random_bits(sum(lens), dtype, seed)
    types: set[torch.dtype] = set()
    firsts = starts or [0] * len(lens)

    def work(group):
        rank = group.rank_in_group
        wire = Wire(group.meeting, rank)
        wire.types = types
        parallel.state = SimpleNamespace(dcp_enabled=True, dcp_size=size, dcp_rank=rank, dcp_group=wire)
        own, offset = [], 0
        for length, start in zip(lens, firsts, strict=True):
            own += [offset + t - start for t in reference.tokens_of(rank, length, size, block, start)]
            offset += length
        share = kv[torch.tensor(own, dtype=torch.int64)] if own else kv[:0]
        return mla_gather.gather_prefix(
            share[..., :LATENT],
            share[..., LATENT:],
            torch.tensor(lens),
            None if starts is None else torch.tensor(starts),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(active, "_layout", DcpLayout(size, block))
        return kv, on_all_ranks(size, work), types


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [*FP8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("starts", [None, [0, 3, 40, 7]])
def test_every_bit_arrives_in_order(parallel, dtype, starts):
    """Requests that leave ranks empty among them. NCCL knows no FP8: it travels as bytes."""
    kv, results, types = gathered(parallel, 4, 8, [70, 1, 5, 33], starts, dtype, seed=1)
    for result in results:
        assert_same_bits(result, kv)
    assert types == {torch.uint8 if dtype in FP8 else dtype}


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_parts_of_fp8(parallel, data):
    size, block = data.draw(st.integers(2, 5), label="ranks"), data.draw(st.integers(1, 9), label="block")
    lens = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4), label="lens")
    starts = data.draw(st.lists(st.integers(0, 60), min_size=len(lens), max_size=len(lens)), label="starts")
    kv, results, _ = gathered(
        parallel, size, block, lens, starts, torch.float8_e4m3fn, data.draw(st.integers(0, 2**31))
    )
    for result in results:
        assert_same_bits(result, kv)


def test_no_prefix_is_no_collective(parallel):
    _, results, types = gathered(parallel, 2, 4, [0, 0], None, torch.float8_e4m3fn, seed=0)
    assert [tuple(result.shape) for result in results] == [(0, 1, LATENT + ROPE)] * 2
    assert types == set()


def test_a_share_of_the_wrong_size_is_an_error(parallel, monkeypatch):
    parallel.state = SimpleNamespace(dcp_enabled=True, dcp_size=2, dcp_rank=1, dcp_group=None)
    monkeypatch.setattr(active, "_layout", DcpLayout(2, 4))
    with pytest.raises(RuntimeError, match=r"expected 4 prefix rows .* got 5"):
        mla_gather.gather_prefix(torch.zeros(5, 1, LATENT), torch.zeros(5, 1, ROPE), torch.tensor([10]))
