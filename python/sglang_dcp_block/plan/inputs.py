"""What a plan is made for, and what of it SGLang or the plugin would refuse."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from sglang_dcp_block.config import AUTO_PAGE_SIZE
from sglang_dcp_block.plan.mix import MAX_TOKENS, Mix
from sglang_dcp_block.shown import line_of, shown
from sglang_dcp_block.support import GQA_BACKENDS, MLA_BACKENDS, Facts, refusals
from sglang_dcp_block.transfer_model.links import Link
from sglang_dcp_block.transfer_model.shapes import ModelShape, from_config, preset

PAGE_SIZES = (
    16,
    32,
    AUTO_PAGE_SIZE,
)  # tokens; to choose from. Longer ones coarsen the prefix cache and were not measured
MAX_GPUS = 2**12  # of a server
MAX_PAGE = 2**20  # tokens
MAX_CHUNKS = 10**5  # of a prompt: the longest that is counted in seconds
MAX_MIX = 10**18  # tokens of all requests together: sums stay exact in 64 bits
CHUNK_TOKENS = 8192  # of chunked prefill, where nobody names another number
_BLOCK_RULE = "block size that does not divide the page size"


class InputError(ValueError):
    """Inputs that no plan can be made for; says what was expected, what was found and what to do."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that the figures depend on."""

    shape: ModelShape
    tp_size: int  # of the decode server
    dcp_size: int
    mix: Mix
    link: Link
    attention_backend: str
    page_size: int | None = None  # tokens; None to choose one
    block_size: int | None = None  # tokens; None to choose one
    chunk_tokens: int = CHUNK_TOKENS  # of chunked prefill on the prefill server
    scattered: bool = False  # pools so fragmented that no two pages of a request are neighbours
    max_imbalance: float = 1.1  # rows of the fullest rank over the mean
    max_rounding: float = 0.2  # of the rows that requests take, those that hold nothing

    @property
    def row_bytes(self) -> int:
        """Of a token in a layer on a decode rank."""
        return self.shape.row_bytes(self.tp_size, self.dcp_size)

    def pages(self) -> tuple[int, ...]:
        """Page sizes to look at, in tokens: the given one, or those that the block divides, or the block itself."""
        if self.page_size is not None:
            return (self.page_size,)
        fitting = tuple(page for page in PAGE_SIZES if page % (self.block_size or 1) == 0)
        return fitting or (self.block_size or AUTO_PAGE_SIZE,)


def shape_of(text: str, kv_dtype: str | None = None) -> ModelShape:
    """A model as a user names it: a preset, or a ``config.json`` or the folder it stands in.

    Args:
        kv_dtype: what KV is stored in; None for the model's own type.
    Raises:
        InputError: neither.
    """
    file = Path(text)
    with contextlib.suppress(OSError):  # no system has such a path
        file = file / "config.json" if text and file.is_dir() else file
    if file.suffix != ".json":
        try:
            shape = preset(text)
        except ValueError as error:
            raise InputError(
                f"--model: {error}; or the path of a config.json. Nothing is fetched by a name."
            ) from error
        return shape.stored_as(kv_dtype) if kv_dtype else shape
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"expected an object, got {type(config).__name__}")
        name = line_of(str(config.get("_name_or_path") or "")) or file.parent.name or file.name
        return from_config(config, line_of(name), kv_dtype)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--model: {file}: expected a model's configuration, got: {error}") from error


def default_backend(shape: ModelShape) -> str:
    """What the plugin takes where none is named."""
    return (MLA_BACKENDS if shape.is_mla else GQA_BACKENDS)[0]


def require_possible(inputs: Inputs) -> None:
    """Refuse what no block or page size could make work.

    Raises:
        InputError: all reasons at once, as a server would give them.
    """
    sizes = [("--tp", inputs.tp_size, MAX_GPUS), ("--dcp", inputs.dcp_size, MAX_GPUS)]
    sizes += [
        (n, v, MAX_PAGE)
        for n, v in (("--page-size", inputs.page_size), ("--block-size", inputs.block_size))
        if v is not None
    ]
    if inputs.chunk_tokens > 0:  # others are answered below
        sizes += [("--chunked-prefill-size", inputs.chunk_tokens, MAX_TOKENS)]
    if wrong := [f"{name}: expected 1 to {most}, got {shown(v)}" for name, v, most in sizes if not 1 <= v <= most]:
        raise InputError("; ".join(wrong))
    if inputs.page_size and inputs.block_size and inputs.page_size % inputs.block_size:
        raise InputError(
            f"--block-size: expected a divisor of --page-size {inputs.page_size}, got {inputs.block_size}. Leave one out."
        )
    if inputs.mix.total_tokens > MAX_MIX:
        raise InputError(
            f"--requests: expected at most {MAX_MIX:,} tokens in all, got {inputs.mix.total_tokens:,}. "
            "Divide the numbers of requests: what is recommended depends on their shares alone."
        )
    if wrong_chunk := _wrong_chunk(inputs):
        raise InputError(wrong_chunk)
    pages = inputs.pages()
    every = [refused(inputs, page, inputs.block_size or page) for page in pages]
    if all(every):
        raise InputError("this server would not start:\n  " + "\n  ".join(every[0]))


def _wrong_chunk(inputs: Inputs) -> str | None:
    """What is wrong with the chunk, with one to take that is right for every page that is looked at."""
    chunk, longest = inputs.chunk_tokens, inputs.mix.longest_prompt
    if chunk < 1:
        return (
            f"--chunked-prefill-size: expected 1 to {MAX_TOKENS}, got {shown(chunk)}. "
            f"Where chunked prefill is off, a prompt is one chunk: take {_in_whole_pages(inputs, longest)}."
        )
    if all(chunk % page for page in inputs.pages()):
        return _no_whole_pages(inputs)
    if (number := -(-longest // chunk)) > MAX_CHUNKS:
        return (
            f"--chunked-prefill-size: expected at most {MAX_CHUNKS:,} chunks of a prompt, got {number:,}: "
            f"{longest:,} tokens in chunks of {chunk}. Take {_least_chunk(inputs)}."
        )
    return None


def _no_whole_pages(inputs: Inputs) -> str:
    """Names the option that was typed: the chunk has a default, and a given block may be the page."""
    chunk, pages, step = inputs.chunk_tokens, inputs.pages(), math.lcm(*inputs.pages())
    page, whole = " or ".join(map(str, pages)), max(_least_chunk(inputs), chunk // step * step)
    given = "--page-size" if inputs.page_size else "--block-size" if inputs.block_size == pages[0] else None
    if given is None or chunk != CHUNK_TOKENS:
        advice = f"Take {whole}." if given is None else f"Take {whole}, or another {given}."
        return f"--chunked-prefill-size: expected a multiple of the page size {page}, got {chunk}. {advice}"
    return (
        f"{given}: expected a page size that divides --chunked-prefill-size, {chunk} where it is left out, got {page}. "
        f"Take another {given}, or pass --chunked-prefill-size {whole} as on your prefill server."
    )


def _least_chunk(inputs: Inputs) -> int:
    return _in_whole_pages(inputs, -(-inputs.mix.longest_prompt // MAX_CHUNKS))


def _in_whole_pages(inputs: Inputs, tokens: int) -> int:
    """As many tokens or more, in whole pages of each size that is looked at; fewer where that would be above the limit."""
    step = math.lcm(*inputs.pages())
    whole = -(-tokens // step) * step
    return whole if whole <= MAX_TOKENS else whole - step


def refused(inputs: Inputs, page_size: int, block_size: int) -> list[str]:
    """Why servers with these sizes would not start; empty if they would."""
    lines = refusals(_facts(inputs, page_size, block_size))
    if inputs.chunk_tokens % page_size:
        lines.append(
            f"chunks of {inputs.chunk_tokens} tokens that the page does not divide: expected whole pages of {page_size}"
        )
    return lines


def transfers_refused(inputs: Inputs) -> list[str]:
    """Why a decode server behind a prefill server cannot have blocks; empty if it can."""
    page = inputs.pages()[-1]
    return [line for line in refusals(_facts(inputs, page, page, mode="decode")) if not line.startswith(_BLOCK_RULE)]


def _facts(inputs: Inputs, page_size: int, block_size: int, mode: str = "null") -> Facts:
    shape = inputs.shape
    return Facts(
        block_size=block_size,
        page_size=page_size,
        dcp_size=inputs.dcp_size,
        tp_size=inputs.tp_size,
        platform="cuda",
        is_mla=shape.is_mla,
        num_attention_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_kv_heads,
        prefill_backend=inputs.attention_backend,
        decode_backend=inputs.attention_backend,
        kv_cache_dtype="fp8_e4m3" if shape.element_bytes == 1 else "auto",
        disaggregation_mode=mode,
        transfer_backend="mooncake",
        is_dsa="is_dsa" in shape.unusual,
        has_sliding_window="has_sliding_window" in shape.unusual,
        has_sparse_layers="has_sparse_layers" in shape.unusual,
        is_hybrid_linear="is_hybrid_linear" in shape.unusual,
        is_encoder_decoder="is_encoder_decoder" in shape.unusual,
    )
