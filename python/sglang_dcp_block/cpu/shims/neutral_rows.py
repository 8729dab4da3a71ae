"""Rows without KV are made neutral by a kernel for CUDA alone, which MLA backends call under DCP; the same in torch."""

from __future__ import annotations

import sys

import torch

from sglang_dcp_block.cpu.shims.target import find, replace_function

TARGET = "sglang.kernels.ops.attention.fixup_zero_kv:fixup_zero_kv_rows"


def fixup_zero_kv_rows(
    out: torch.Tensor, lse: torch.Tensor, kv_lens: torch.Tensor, cum_seq_lens: torch.Tensor, max_seq_len: int
) -> None:
    """Set out = 0 and LSE = -inf, in place, for the tokens of each request without KV.

    Args:
        out: [num_tokens, heads, head_dim] float.
        lse: [num_tokens, heads] float32.
        kv_lens: [num_requests] int.
        cum_seq_lens: [num_requests + 1] int, where each request's tokens begin.
        max_seq_len: not needed here.
    """
    empty = torch.repeat_interleave(kv_lens == 0, cum_seq_lens.diff())
    out.masked_fill_(empty[:, None, None], 0)
    lse.masked_fill_(empty[:, None], float("-inf"))


def install() -> None:
    """Put the torch version in the kernel's place, also in modules that have imported it by name."""
    _, name, kernel = find(TARGET)
    replace_function(TARGET, fixup_zero_kv_rows)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is kernel:
            setattr(module, name, fixup_zero_kv_rows)
