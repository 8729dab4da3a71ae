"""The MLA backends that read page tables, on CPU tensors: upstream's own code around a stand-in for their decode kernel.

:class:`Deck` deals requests over ranks with the walked oracle and fills each rank's pool; :func:`backend_of` makes a
backend around one rank's; :func:`decode_kernel` is the contract of FlashInfer's ``trtllm_batch_decode_with_kv_cache_mla`` in
torch, by its documentation, with what it leaves undefined left as NaN.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import reference
from sglang_dcp_block.patches import write_door

BACKENDS = {
    "trtllm_mla": ("trtllm_mla_backend", "TRTLLMMLABackend", "trtllm-gen"),
    "cutedsl_mla": ("cutedsl_mla_backend", "CuteDslMLABackend", "cute-dsl"),
}
MODULES = [
    importlib.import_module(f"sglang.srt.layers.attention.{m}") for m in ("trtllm_mla_backend", "cutedsl_mla_backend")
]
LATENT, ROPE = 16, 8
SCALE = 0.3
LOG2_E = math.log2(math.e)


@dataclass
class Deck:
    """Requests in virtual pages of their own, and the KV that each rank holds of them.

    A request's last token is not in the pools yet: a decode step writes it.
    """

    size: int  # DCP ranks
    block: int
    page: int  # tokens, per rank
    lens: list[int]
    kv: list[torch.Tensor]  # of each request: [tokens, LATENT + ROPE]
    req_to_token: (
        torch.Tensor
    )  # [requests + 1, max_context] int32; row 0 is padding's; behind a request: no slot at all
    pools: list[torch.Tensor]  # of each rank: [rows, 1, LATENT + ROPE]; NaN where nothing was stored

    @classmethod
    def make(cls, size: int, block: int, page: int, lens: list[int], max_context: int, seed: int = 0) -> Deck:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        virtual = size * page
        where = reference.deal(virtual, size, block)  # (owner, row within the page) by offset in a virtual page
        pages = [-(-length // virtual) for length in lens]
        ids = list(range(1, 1 + sum(pages) + 3))
        rng.shuffle(ids)
        table = torch.full((len(lens) + 1, max_context), 2**30, dtype=torch.int32)
        table[0] = 0
        pools = [torch.full(((len(ids) + 1) * page, 1, LATENT + ROPE), torch.nan) for _ in range(size)]
        for pool in pools:
            pool[:page] = 0  # the sink
        kv = []
        for b, length in enumerate(lens):
            own, ids = ids[: pages[b]], ids[pages[b] :]
            kv.append(torch.randn(length, LATENT + ROPE, generator=generator))
            for t in range(length):
                table[b + 1, t] = own[t // virtual] * virtual + t % virtual
                owner, row = where[t % virtual]
                if t < length - 1:
                    pools[owner][own[t // virtual] * page + row, 0] = kv[b][t]
        return cls(size, block, page, lens, kv, table, pools)

    def batch(self, padded: int = 0) -> SimpleNamespace:
        """A decode step of all requests, and of ``padded`` rows as CUDA graphs add them."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        lens = torch.tensor(self.lens + [1] * padded)
        last = [int(self.req_to_token[b + 1, n - 1]) for b, n in enumerate(self.lens)]
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(lens),
            req_pool_indices=torch.tensor([*range(1, 1 + len(self.lens)), *[0] * padded]),
            seq_lens=lens,
            seq_lens_cpu=lens,
            positions=lens - 1,
            kv_loc_plan=None,
            out_cache_loc=write_door.write_ids(torch.tensor(last + [0] * padded)),
            out_cache_loc_is_physical=True,
        )

    def queries(self, heads: int, seed: int = 0) -> torch.Tensor:
        """[requests, heads, LATENT + ROPE]"""
        return torch.randn(len(self.lens), heads, LATENT + ROPE, generator=torch.Generator().manual_seed(seed))

    def dense(self, queries: torch.Tensor) -> torch.Tensor:
        """[requests, heads, LATENT]: attention over all tokens, in float64."""
        rows = [attend(q.double(), kv.double())[0] for q, kv in zip(queries, self.kv, strict=True)]
        return torch.stack(rows)


def attend(q: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([heads, LATENT], natural LSE [heads]) of q [heads, width] over kv [tokens, width]."""
    scores = q @ kv.T * SCALE
    return torch.softmax(scores, -1) @ kv[:, :LATENT], torch.logsumexp(scores, -1)


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]], natural: bool) -> torch.Tensor:
    """Exact merge of every rank's (out, LSE); NaN anywhere stays NaN."""
    outs, lses = (torch.stack(tensors).double() for tensors in zip(*parts, strict=True))
    return (torch.softmax(lses if natural else lses / LOG2_E, 0)[..., None] * outs).sum(0)


def decode_kernel(
    *,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float,
    kv_lora_rank: int,
    return_lse: bool,
    backend: str = "trtllm-gen",
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads the rows below ``seq_lens`` through the page table, no more of them than ``max_seq_len`` schedules.

    cute-dsl hides row i unless ``i * cp_world + cp_rank`` is below the causal bound, and gives a natural LSE; trtllm-gen
    one in base 2. A request without a visible row is left undefined.
    """
    num_requests, num_queries, heads, _ = query.shape
    pages, _, page, _ = kv_cache.shape
    for tensor in (seq_lens, block_tables, *([causal_seqlens_kv_global] if enable_dcp else [])):
        assert tensor is not None
        assert (tensor.dtype, tensor.is_contiguous()) == (torch.int32, True)
    assert (num_queries, return_lse, kv_lora_rank, bmm1_scale) == (1, True, LATENT, SCALE)
    assert enable_dcp == (backend == "cute-dsl")
    assert page in (32, 64)
    assert block_tables.shape[1] % (128 // page) == 0
    assert max_seq_len >= 1
    out = torch.full((num_requests, 1, heads, LATENT), torch.nan)
    lse = torch.full((num_requests, 1, heads), torch.nan)
    for b in range(num_requests):
        count = min(int(seq_lens[b]), max_seq_len)
        assert -(-count // page) <= block_tables.shape[1]
        if enable_dcp:
            assert causal_seqlens_kv_global is not None
            bound = int(causal_seqlens_kv_global[b])
            visible = [i for i in range(count) if i * cp_world + cp_rank < bound]
        else:
            visible = list(range(count))
        if visible:
            table = block_tables[b].tolist()
            assert all(0 <= table[i // page] < pages for i in visible), "a page that is not there"
            rows = torch.stack([kv_cache[table[i // page], 0, i % page] for i in visible])
            part, natural = attend(query[b, 0].double(), rows.double())
            out[b, 0], lse[b, 0] = part.float(), (natural if backend == "cute-dsl" else natural * LOG2_E).float()
    return out, lse


def fixup(
    out: torch.Tensor, lse: torch.Tensor, kv_lens: torch.Tensor, cum_seq_lens: torch.Tensor, max_seq_len: int
) -> None:
    """Upstream's ``fixup_zero_kv_rows`` by its documentation; the real one is CUDA source."""
    assert (kv_lens.dtype, cum_seq_lens.dtype) == (torch.int32, torch.int32)
    for b, length in enumerate(kv_lens.tolist()):
        if length == 0:
            tokens = slice(int(cum_seq_lens[b]), int(cum_seq_lens[b + 1]))
            out[tokens], lse[tokens] = 0, -math.inf


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """SGLang's parallel state of one DCP rank, and the stand-ins for what needs CUDA."""
    from sglang.kernels.ops.kvcache import mla_buffer
    from sglang.srt import runtime_context

    parallel = SimpleNamespace(dcp_enabled=True, dcp_size=size, dcp_rank=rank, attn_dcp_size=size, attn_dcp_rank=rank)
    flashinfer = SimpleNamespace(decode=SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=decode_kernel))
    with contextlib.ExitStack() as stack:
        for module in (*MODULES, mla_buffer, runtime_context):
            stack.enter_context(mock.patch.object(module, "get_parallel", return_value=parallel))
        for module in MODULES:
            stack.enter_context(mock.patch.object(module, "flashinfer", flashinfer, create=True))
            stack.enter_context(mock.patch.object(module, "fixup_zero_kv_rows", fixup))
        yield


class Pool:
    """One rank's KV pool, written by upstream's own kernel."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.rows

    def set_mla_kv_buffer(self, layer: Any, loc_info: Any, k: torch.Tensor, k_rope: torch.Tensor) -> None:
        from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_dcp_sharded_triton

        set_mla_kv_buffer_dcp_sharded_triton(self.rows, loc_info.loc, k, k_rope)


def backend_of(name: str, deck: Deck, rank: int) -> Any:
    """A backend of one rank, without what its constructor needs a GPU for."""
    module, cls, kernel = BACKENDS[name]
    backend = object.__new__(getattr(importlib.import_module(f"sglang.srt.layers.attention.{module}"), cls))
    backend.__dict__.update(
        backend=kernel,
        device="cpu",
        page_size=deck.page,
        max_context_len=deck.req_to_token.shape[1],
        req_to_token=deck.req_to_token,
        kv_index_translator=SimpleNamespace(full_v2p_table=None, is_translating=False),
        token_to_kv_pool=Pool(deck.pools[rank].clone()),
        data_type=torch.float32,
        q_data_type=torch.float32,
        num_q_heads=1,
        kv_cache_dim=LATENT + ROPE,
        is_draft_runner=False,
        skip_prefill=False,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=LATENT,
        q_indptr_decode=torch.arange(65, dtype=torch.int32),
        num_draft_tokens=None,
        decode_cuda_graph_metadata={},
        forward_prefill_metadata=None,
        forward_decode_metadata=None,
        workspace_buffer=None,
        _multi_ctas_kv_counter_buffer=None,
        _kv_shard_pool=None,
        _fused_set_kv_concat_q=False,
        _fused_set_kv_concat_q_fp8=False,
    )
    return backend


def layer_of(heads: int) -> SimpleNamespace:
    return SimpleNamespace(
        layer_id=0, tp_q_head_num=heads, v_head_dim=LATENT, head_dim=LATENT + ROPE, scaling=SCALE, k_scale_float=None
    )


def decode(
    backend: Any, deck: Deck, batch: SimpleNamespace, queries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backend's decode of one layer: (out [requests, heads, LATENT], LSE [requests, heads]), padding cut off."""
    num_requests, heads, padded = len(deck.lens), queries.shape[1], batch.batch_size - len(deck.lens)
    new = torch.cat([torch.stack([kv[-1] for kv in deck.kv]), torch.zeros(padded, LATENT + ROPE)])[:, None]
    query = torch.cat([queries, torch.zeros(padded, *queries.shape[1:])])
    out, lse = backend.forward_decode(
        query[..., :LATENT].flatten(1), new[..., :LATENT], None, layer_of(heads), batch,
        q_rope=query[..., LATENT:].flatten(1), k_rope=new[..., LATENT:].contiguous(),
    )  # fmt: skip
    return out.view(-1, heads, LATENT)[:num_requests], lse[:num_requests]
