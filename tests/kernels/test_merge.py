"""The merge of partial attention over ranks: upstream's own functions, all ranks in one process, against dense float64.

The tokens of each request are dealt to ranks at random, so ranks hold anything from all of a request to nothing. What a
rank without tokens would send is NaN until ``neutralise_empty`` has been over it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.layers.dcp import comm

from ranks import Group, on_all_ranks
from sglang_dcp_block.kernels.neutralise import neutralise_empty
from sglang_dcp_block.patches import mla_decode

EPS = torch.finfo(torch.float32).eps
LOG2_E = math.log2(math.e)
DIM = 16
laws = settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])

Merge = Callable[[torch.Tensor, torch.Tensor, Group, bool], torch.Tensor]  # (out, lse, group, natural) -> own heads


def all_gather_mla(out: torch.Tensor, lse: torch.Tensor, group: Group, natural: bool) -> torch.Tensor:
    return comm.cp_lse_ag_out_rs_mla(out, lse, group, is_lse_base_on_e=natural).transpose(0, 1)


def all_gather_mha(out: torch.Tensor, lse: torch.Tensor, group: Group, natural: bool) -> torch.Tensor:
    return comm.cp_lse_ag_out_rs_mha(out, lse, group)


def all_to_all(out: torch.Tensor, lse: torch.Tensor, group: Group, natural: bool) -> torch.Tensor:
    return comm.dcp_a2a_lse_reduce(out, lse, group, is_lse_base_on_e=natural)


def flashinfer_all_to_all(out: torch.Tensor, lse: torch.Tensor, group: Group, natural: bool) -> torch.Tensor:
    """FlashInfer moves the bytes; that exchange alone is a stand-in. Packing and combining are upstream's, as of a2a."""

    def exchange(
        partial: torch.Tensor, stats: torch.Tensor, workspace: Group, rank: int, size: int
    ) -> list[torch.Tensor]:
        assert (partial.shape[2], stats.shape[2:]) == (size, (size, 2))
        assert (workspace, rank) == (group, group.rank_in_group)
        return [torch.stack([sent[:, :, rank] for sent in group._joined(t)], dim=2) for t in (partial, stats)]

    flashinfer = {name: ModuleType(name) for name in ("flashinfer", "flashinfer.comm", "flashinfer.comm.dcp_alltoall")}
    flashinfer["flashinfer.comm.dcp_alltoall"].decode_cp_a2a_alltoall = exchange  # type: ignore[attr-defined]
    state = {"workspace": group, "cp_rank": group.rank_in_group}
    with mock.patch.dict(sys.modules, flashinfer), mock.patch.object(comm, "_FI_A2A_STATE", state):
        return comm.dcp_a2a_lse_reduce(out, lse, group, is_lse_base_on_e=natural, comm_backend="fi_a2a")


MERGES: dict[str, tuple[Merge, tuple[bool, ...]]] = {  # with the LSE bases that each has
    "ag_rs mla": (all_gather_mla, (True, False)),
    "ag_rs mha": (all_gather_mha, (True,)),
    "a2a": (all_to_all, (True, False)),
    "fi_a2a": (flashinfer_all_to_all, (True, False)),
}
CASES = [
    pytest.param(merge, base, id=f"{name}-{'e' if base else '2'}")
    for name, (merge, bases) in MERGES.items()
    for base in bases
]


@dataclass
class Split:
    """Requests whose tokens lie on several ranks."""

    outs: torch.Tensor  # [ranks, requests, heads, DIM] float32; NaN where the rank has no token
    lses: torch.Tensor  # [ranks, requests, heads] float32; NaN likewise
    lens: torch.Tensor  # [ranks, requests] tokens
    want: torch.Tensor  # [requests, heads, DIM] float64, dense

    @classmethod
    def make(
        cls, size: int, lens: list[int], heads: int, spread: float, offset: float, natural: bool, seed: int
    ) -> Split:
        """``spread`` is the scores' standard deviation; ``offset`` is added to every score, and so to every LSE."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        split = cls(
            torch.full((size, len(lens), heads, DIM), torch.nan), torch.full((size, len(lens), heads), torch.nan),
            torch.zeros(size, len(lens), dtype=torch.int32), torch.empty(len(lens), heads, DIM, dtype=torch.float64),
        )  # fmt: skip
        for b, length in enumerate(lens):
            scores, values = draw(length, heads) * spread + offset, draw(length, heads, DIM)
            split.want[b] = (torch.softmax(scores, 0)[..., None] * values).sum(0)
            holders = torch.randperm(size, generator=generator)[
                : int(torch.randint(1, size + 1, (), generator=generator))
            ]
            owner = holders[torch.randint(len(holders), (length,), generator=generator)]
            for rank in range(size):
                own = owner == rank
                split.lens[rank, b] = int(own.sum())
                if own.any():
                    split.outs[rank, b] = (torch.softmax(scores[own], 0)[..., None] * values[own]).sum(0).float()
                    lse = torch.logsumexp(scores[own], 0)
                    split.lses[rank, b] = (lse if natural else lse * LOG2_E).float()
        return split

    def neutralised(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, LSE) of a rank as its backend hands them to the merge."""
        out, lse = self.outs[rank].clone(), self.lses[rank].clone()
        indptr = torch.zeros(len(self.want) + 1, dtype=torch.int32)
        indptr[1:] = self.lens[rank].cumsum(0)
        neutralise_empty(out, lse, indptr)
        return out, lse

    def merged(self, merge: Merge, natural: bool) -> torch.Tensor:
        """[requests, heads, DIM]: the heads of all ranks after the merge."""

        def work(group: Group) -> torch.Tensor:
            return merge(*self.neutralised(group.rank_in_group), group, natural)

        return torch.cat(on_all_ranks(len(self.outs), work), dim=1)

    @property
    def tolerance(self) -> float:
        largest, lse = float(self.want.abs().max()), float(self.lses.nan_to_num(nan=0.0).abs().max())
        return (2e-6 if lse <= 8 else 4 * EPS * lse) * largest


def assert_exact(split: Split, merge: Merge, natural: bool) -> None:
    got = split.merged(merge, natural)
    worst = float((got.double() - split.want).abs().max())
    assert worst <= split.tolerance, (worst, split.tolerance)


@pytest.mark.parametrize(("merge", "natural"), CASES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_merge_equals_dense_attention(merge, natural, size):
    """Requests of 1 token to 200; a single token leaves all ranks but one empty."""
    assert_exact(Split.make(size, [1, 200, 2, 17], size, 1.0, 0.0, natural, seed=size), merge, natural)


@pytest.mark.parametrize(("merge", "natural"), CASES)
@pytest.mark.parametrize("offset", [-2000.0, -30.0, 30.0, 2000.0])
def test_large_lse(merge, natural, offset):
    """An LSE far from 0 is rounded coarsely, and nothing may overflow or vanish."""
    split = Split.make(4, [1, 60, 3], 4, 2.0, offset, natural, seed=5)
    assert split.lses.nan_to_num().abs().max() > 25
    assert_exact(split, merge, natural)


@pytest.mark.parametrize(("merge", "natural"), CASES)
@laws
@given(data=st.data())
def test_any_split(merge, natural, data):
    size = data.draw(st.sampled_from([2, 4, 8]), label="ranks")
    lens = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3), label="lens")
    spread, offset = data.draw(st.floats(0, 4), label="spread"), data.draw(st.floats(-100, 100), label="offset")
    seed = data.draw(st.integers(0, 2**31), label="seed")
    assert_exact(Split.make(size, lens, size, spread, offset, natural, seed), merge, natural)


@contextmanager
def combined() -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """What reaches the all-to-all combine on each rank: (outputs, LSEs) of all ranks."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    combine = comm.dcp_lse_combine_triton

    def spy(outs: torch.Tensor, lses: torch.Tensor, **kwargs: Any) -> Any:
        seen.append((outs.clone(), lses.clone()))
        return combine(outs, lses, **kwargs)

    with mock.patch.object(comm, "dcp_lse_combine_triton", spy):
        yield seen


@pytest.mark.parametrize("merge", [all_to_all, flashinfer_all_to_all])
def test_no_nan_reaches_the_all_to_all_combine(merge):
    """It has no guard: a NaN output times a weight of 0 is NaN. What a rank leaves for a request without KV is NaN here."""
    split = Split.make(4, [1, 30, 2], 4, 1.0, 0.0, True, seed=3)
    assert split.outs.isnan().any(), "no rank is empty: the case tests nothing"
    with combined() as seen:
        got = split.merged(merge, True)
    assert len(seen) == 4
    for outs, lses in seen:
        assert outs.isfinite().all()
        assert not lses.isnan().any()
        assert (lses == -math.inf).any()
    assert got.isfinite().all()

    raw = on_all_ranks(4, lambda g: merge(split.outs[g.rank_in_group], split.lses[g.rank_in_group], g, True))
    assert torch.cat(raw, dim=1).isnan().any(), "the combine is guarded now: the neutral element could go"


@pytest.mark.parametrize("merge", [all_gather_mla, all_to_all, flashinfer_all_to_all])
def test_flashinfer_backend_hands_over_the_neutral_element(merge):
    """Through the plugin's hook on the backend's decode, over output memory that was never written for empty requests."""
    split = Split.make(4, [1, 25, 4], 4, 1.0, 0.0, False, seed=9)

    def work(group: Group) -> torch.Tensor:
        rank = group.rank_in_group

        def attention(
            self: Any, q: None, k: None, v: None, layer: None, forward_batch: None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return split.outs[rank].clone().flatten(1), split.lses[rank].clone()

        indptr = torch.zeros(9, dtype=torch.int32)  # longer than the batch, as the backend's buffer
        indptr[1:4] = split.lens[rank].cumsum(0)
        backend = SimpleNamespace(indices_updater_decode=SimpleNamespace(kv_indptr=indptr))
        out, lse = mla_decode.decode_with_empty_ranks(attention, backend, None, None, None, None, None)
        return merge(out.view(3, 4, DIM), lse, group, False)

    got = torch.cat(on_all_ranks(4, work), dim=1)
    assert float((got.double() - split.want).abs().max()) <= split.tolerance


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter: log(0), -inf - -inf
def test_nobody_holds_anything():
    """A padded request of a CUDA graph: no rank has KV of it, and the result is 0 on the paths that divide by the weight."""
    split = Split.make(2, [3, 3], 2, 1.0, 0.0, True, seed=1)
    split.outs[:, 1], split.lses[:, 1], split.lens[:, 1] = torch.nan, torch.nan, 0
    for merge in (all_to_all, flashinfer_all_to_all, all_gather_mha, all_gather_mla):
        got = split.merged(merge, True)
        assert got.isfinite().all(), merge
        assert torch.equal(got[1], torch.zeros_like(got[1])), merge


@pytest.mark.parametrize("merge", [all_to_all, flashinfer_all_to_all])
def test_half_precision_keeps_the_lse(merge):
    """Outputs of 16 bits travel with an LSE of 32: the result is off by the rounding of outputs alone."""
    split = Split.make(4, [50, 7], 8, 3.0, 300.0, True, seed=2)
    split.outs = split.outs.bfloat16()
    got = split.merged(merge, True)
    assert got.dtype == torch.bfloat16
    assert float((got.double() - split.want).abs().max()) <= 2**-7 * float(split.want.abs().max())


def test_a_rank_that_leaves_a_collective_out_is_noticed(monkeypatch):
    """The harness itself: it does not hang, and does not pass."""
    monkeypatch.setattr("ranks.TIMEOUT", 0.1)
    with pytest.raises(TimeoutError):
        on_all_ranks(2, lambda group: group.rank_in_group or group.all_reduce(torch.zeros(1)))
