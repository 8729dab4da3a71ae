"""Optional: the correction of partial MLA outputs in torch.

The merge over DCP ranks scales each rank's output by ``exp(lse - total lse)``, one Triton program per request and head.
In the interpreter that is most of a decode step: 16 tokens of one request on the tiny MLA model (tp2, dcp2, 2 layers,
8 heads) took 3.5 s with the kernel and 0.9 s with this.  Off by default, so that tests run the kernel that users run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_dcp_block.cpu.shims.target import find, replace_function

if TYPE_CHECKING:
    import torch

MODULE = "sglang.srt.layers.dcp.comm"


def corrected(
    out: torch.Tensor,
    lses: torch.Tensor,
    cp_rank: int,
    ctx: Any,
    new_output: torch.Tensor,
    is_lse_base_on_e: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale a rank's partial output by its share of the softmax over all ranks.

    As in the kernel, LSEs that are NaN or +inf count as -inf, and the output of a rank without weight is multiplied by
    0 (so NaN in it stays NaN).

    Args:
        out: ``[B, H, D] float``, this rank's output.
        lses: ``[dcp_size, B, H] float32``, of all ranks.
        cp_rank: this rank.
        ctx: the kernel's launch cache; unused.
        new_output: ``[H, B, D] float32``, filled in place.
        is_lse_base_on_e: base of ``lses``: e, or 2.

    Returns:
        ``(new_output, lse)``: ``lse [B, H]`` over all ranks, in the base of ``lses``.
    """
    import torch

    log_base = 1.0 if is_lse_base_on_e else 0.6931471805599453
    natural = (lses * log_base).nan_to_num(nan=float("-inf"), posinf=float("-inf"), neginf=float("-inf"))
    total = torch.logsumexp(natural, dim=0)
    factor = torch.exp(natural[cp_rank] - total).nan_to_num(nan=0.0)
    new_output.copy_((out * factor[..., None]).transpose(0, 1))
    return new_output, total / log_base


def install() -> None:
    """Correct partial outputs in torch."""
    find(f"{MODULE}:cp_lse_ag_out_rs_mla")
    replace_function(f"{MODULE}:correct_attn_out", corrected)
