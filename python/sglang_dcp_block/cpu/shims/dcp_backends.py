"""Backends without a DCP path are refused: once the platform check answers yes, nothing in SGLang looks at the backend.

SGLang's own backends for CPUs know nothing of DCP: each rank would take its share of the KV for the whole.  This is the
last step of SGLang's argument resolution, so it sees what will run, and nothing has been started yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dcp_block.cpu.shims.target import ShimError

STEP = "validate_deepep_v2_dispatch_token_budget"  # the last one that plugins may wrap
FLAGS = "--attention-backend (or --prefill-attention-backend and --decode-attention-backend)"


def usable(is_mla: bool, triton_mla: bool) -> tuple[str, ...]:
    """Attention backends that have a DCP path here, the first choice first.

    Args:
        triton_mla: whether the Triton backend has DCP for MLA, which stock SGLang lacks.
    """
    if not is_mla:
        return ("triton",)
    return ("flashinfer", "triton") if triton_mla else ("flashinfer",)


def why_not(dcp_size: int, is_mla: bool, prefill: str, decode: str, triton_mla: bool) -> str | None:
    """Why a server with these attention backends may not start here, or None where it may.

    >>> why_not(2, False, "triton", "triton", False), why_not(1, False, "intel_amx", "intel_amx", False)
    (None, None)
    """
    right = usable(is_mla, triton_mla)
    wrong = [backend for backend in dict.fromkeys((prefill, decode)) if backend not in right]
    if dcp_size == 1 or not wrong:
        return None
    reason = (
        f"--dcp-size {dcp_size} cannot be used here: expected the attention backend {' or '.join(right)}, which has DCP on "
        f"CPUs for {'MLA' if is_mla else 'GQA and MHA'} models, got {' and '.join(wrong)}. Pass {right[0]} as {FLAGS}"
    )
    return reason + (", or --dcp-block-size 1 with triton." if wrong == ["triton"] else ".")


def install() -> None:
    """Refuse such a server at the end of SGLang's argument resolution."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook(STEP)(refuse)


def refuse(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around the step: let a server with DCP go on only with a backend that has it.

    Raises:
        ShimError: saying which backend to pass.
    """
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, use_mla_backend
    from sglang.srt.arg_groups.overrides import resolving_view

    previous(server_args)
    cfg = resolving_view(server_args)
    if cfg.dcp_size == 1 or cfg.device != "cpu":
        return
    is_mla, (prefill, decode) = bool(use_mla_backend(server_args)), attention_backends_of(cfg)
    triton_mla = is_mla and "triton" in (prefill, decode) and _has_triton_mla(server_args)
    if reason := why_not(cfg.dcp_size, is_mla, prefill, decode, triton_mla):
        raise ShimError(reason)


def _has_triton_mla(server_args: Any) -> bool:
    """The plugin is armed, with blocks of any size, or this SGLang has blocks of its own and judges by itself."""
    if hasattr(server_args, "dcp_block_size"):
        return True
    from sglang_dcp_block.patches.flag import armed_block_size

    return armed_block_size(server_args) is not None
