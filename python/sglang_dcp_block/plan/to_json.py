"""A plan as JSON. Keys are stable: a new version adds some, and ``schema`` rises when one changes its meaning."""

from __future__ import annotations

import json
from typing import Any

from sglang_dcp_block.plan.figures import goes_direct
from sglang_dcp_block.plan.whole import Plan

SCHEMA = 1


def as_dict(plan: Plan) -> dict[str, Any]:
    """Plain data, as docs/plan.md describes it."""
    inputs, advice, link = plan.inputs, plan.advice, plan.inputs.link
    return {
        "schema": SCHEMA,
        "inputs": {
            "model": inputs.shape.name,
            "num_layers": inputs.shape.num_layers,
            "row_bytes": inputs.row_bytes,
            "is_mla": inputs.shape.is_mla,
            "tp_size": inputs.tp_size,
            "dcp_size": inputs.dcp_size,
            "attention_backend": inputs.attention_backend,
            "chunked_prefill_size": inputs.chunk_tokens,
            "pools": "scattered" if inputs.scattered else "fresh",
            "max_imbalance": inputs.max_imbalance,
            "max_rounding": inputs.max_rounding,
            "mix": {
                "name": inputs.mix.name,
                "requests": inputs.mix.number,
                "tokens": inputs.mix.total_tokens,
                "longest_prompt": inputs.mix.longest_prompt,
            },
            "link": {
                "name": link.name,
                "segment_seconds": link.segment_seconds,
                "bytes_per_second": link.bytes_per_second,
                "gather_bytes_per_second": link.gather_bytes_per_second,
                "sync_seconds": link.sync_seconds,
                "sources": [{"figure": s.figure, "text": s.text, "url": s.url} for s in link.sources],
            },
        },
        "advice": {
            "page_size": advice.page_size,
            "block_size": advice.block_size,
            "group_pages": advice.group_pages,
            "sent": advice.sent,
            "decode_flags": list(advice.decode_flags),
            "prefill_flags": list(advice.prefill_flags),
            "reasons": list(advice.reasons),
            "warnings": list(advice.warnings),
        },
        "balance": {
            "token_round_robin": {"rows": list(plan.by_tokens.rows), "imbalance": plan.by_tokens.imbalance},
            "blocks": {"rows": list(plan.by_blocks.rows), "imbalance": plan.by_blocks.imbalance},
        },
        "kv_bytes_per_gpu": {
            "tp_alone": plan.memory.tp_alone,
            "dcp_mean": plan.memory.mean,
            "dcp_fullest": plan.memory.fullest,
            "saving": plan.memory.saving,
        },
        "rounding": {
            "virtual_page_tokens": plan.rounding.virtual_page,
            "taken_tokens": plan.rounding.taken,
            "used_tokens": plan.rounding.used,
            "share_lost": plan.rounding.share_lost,
        },
        "transfers": [
            {
                "name": one.name,
                "block_size": one.block_size,
                "segments": one.segments,
                "bytes": one.num_bytes,
                "staged_bytes": one.staged_bytes,
                "modelled_rank_seconds": one.rank_seconds,
                "modelled_longest_prompt_seconds": one.longest_seconds,
            }
            for one in plan.sendings
        ],
        "break_even_block": plan.break_even_block,
        "block_goes_direct": goes_direct(inputs, advice.block_size) if plan.sendings else None,
        "candidates": [
            {
                "page_size": one.page_size,
                "block_size": one.block_size,
                "imbalance": one.imbalance,
                "share_lost": one.share_lost,
                "against": list(one.against),
            }
            for one in plan.candidates
        ],
    }


def as_json(plan: Plan) -> str:
    """The same as text."""
    return json.dumps(as_dict(plan), indent=2)
