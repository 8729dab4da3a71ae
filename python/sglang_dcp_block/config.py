"""The block size as a user asks for it, and what it resolves to.  Plain functions; SGLang is not imported.

The flag, the Engine keyword and the environment variable all end in one :class:`Request`, which is resolved once, when
SGLang resolves its own arguments: first the page size (:func:`page_size_for`), at the end the block size
(:func:`block_size_for`), then the refusals of :mod:`sglang_dcp_block.support`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sglang_dcp_block.refused import StartRefused
from sglang_dcp_block.shown import shown

FLAG = "--dcp-block-size"
ALIAS = "--dcp-interleave-size"
KEYWORD = "dcp_block_size"
ENVIRONMENT = "SGLANG_DCP_BLOCK_SIZE"
AUTO: Literal["auto"] = "auto"
MAX_TOKENS = MAX_RANKS = 2**31 - 1  # what fits where they travel
AUTO_PAGE_SIZE = 64  # tokens; the page of `auto` where --page-size is unset

HELP = (
    "Deal the KV cache over the DCP ranks in blocks of N tokens instead of token by token (owner of position t: "
    "t // N %% dcp_size). N must divide --page-size; 'auto' takes the page size. Where --page-size is unset it becomes N "
    f"({AUTO_PAGE_SIZE} for 'auto'). 1 is token round-robin, SGLang's own layout. "
    f"Example: --tp 8 --dcp-size 8 {FLAG} 64. [sglang-dcp-block]"
)


GROUP_FLAG = "--dcp-group-pages"
GROUP_KEYWORD = "dcp_group_pages"
GROUP_HELP = (
    "On a prefill server: place the pages of each chunk so that those bound for one of P decode ranks lie side by side, "
    "for decode servers with --dcp-size P and blocks of a page. On such a decode server: give requests pages with few "
    "gaps. "
    f"Example: --disaggregation-mode prefill --page-size 64 {GROUP_FLAG} 8. [sglang-dcp-block]"
)


class BlockSizeError(StartRefused, ValueError):
    """The block size, or something it is combined with, is refused."""


@dataclass(frozen=True, slots=True)
class Request:
    """A block size as it was asked for."""

    value: int | Literal["auto"]  # tokens
    source: str  # where it came from, as the user knows it

    def __str__(self) -> str:
        return f"{self.source} {self.value}"

    @property
    def wants_blocks(self) -> bool:
        """Whether this asks for anything but SGLang's own token round-robin."""
        return self.value != 1


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A grouping of pages as it was asked for."""

    ranks: int  # of each decode server
    source: str  # where it came from, as the user knows it

    def __str__(self) -> str:
        return f"{self.source} {self.ranks}"


def parse(value: object, source: str) -> Request:
    """A :class:`Request` from what a user typed or passed.

    Args:
        value: a positive int of at most 2**31 - 1, its decimal text, or ``"auto"``.
        source: how errors name the place it came from.
    Raises:
        BlockSizeError: anything else, saying expected and got.

    >>> parse("64", "--dcp-block-size")
    Request(value=64, source='--dcp-block-size')
    """
    if isinstance(value, str) and value == AUTO:
        return Request(AUTO, source)
    number = _number(value)
    if number is None or number < 1:
        raise BlockSizeError(f"{source}: expected a positive number of tokens or 'auto', got {shown(value)}")
    if number > MAX_TOKENS:
        raise BlockSizeError(f"{source}: expected at most {MAX_TOKENS} tokens, got {shown(value)}")
    return Request(number, source)


def parse_group_pages(value: object, source: str) -> int:
    """The number of decode ranks to group pages for, from what a user typed or passed.

    Args:
        value: an int from 2 to 2**31 - 1, or its decimal text.
        source: how errors name the place it came from.
    Raises:
        BlockSizeError: anything else, saying expected and got.

    >>> parse_group_pages("8", "--dcp-group-pages")
    8
    """
    number = _number(value)
    if number is None or number < 2:
        raise BlockSizeError(f"{source}: expected the decode servers' --dcp-size, 2 or more, got {shown(value)}")
    if number > MAX_RANKS:
        raise BlockSizeError(
            f"{source}: expected the decode servers' --dcp-size, {MAX_RANKS} at most, got {shown(value)}"
        )
    return number


def _number(value: object) -> int | None:
    """The int that a value is, or that its text is in decimal digits and nothing else; None for anything else.

    Text of more digits than any limit here has is read as a number above them: Python refuses to read thousands.
    """
    if isinstance(value, str):
        if not (value.isascii() and value.isdecimal()):
            return None
        digits = value.lstrip("0")
        return int(digits or "0") if len(digits) < 20 else 10**20
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return int(value)


def from_environment(environ: Mapping[str, str]) -> Request | None:
    """The request of the environment variable, for programs that build SGLang's arguments themselves; None if unset.

    Raises:
        BlockSizeError: it is set to something that is no block size.
    """
    text = environ.get(ENVIRONMENT, "")
    return parse(text, ENVIRONMENT) if text else None


def page_size_for(request: Request, page_size: int | None) -> int | None:
    """The page size in tokens to start from: the user's own (None: SGLang's default) or one that the blocks need.

    CUDA's default page is one token, which no block but B = 1 divides; so an unset page size follows the block size.

    >>> page_size_for(Request(16, "flag"), None), page_size_for(Request("auto", "flag"), None)
    (16, 64)
    """
    if page_size is not None or not request.wants_blocks:
        return page_size
    return AUTO_PAGE_SIZE if request.value == AUTO else request.value


def block_size_for(request: Request, page_size: int) -> int:
    """The block size in tokens for the page size that SGLang finally runs with.

    Raises:
        BlockSizeError: ``auto`` with pages of one token, which would silently be token round-robin.
    """
    if request.value != AUTO:
        return request.value
    if page_size == 1:
        raise BlockSizeError(
            f"{request}: expected a page size above 1, got --page-size 1. Leave --page-size unset "
            f"(it becomes {AUTO_PAGE_SIZE}), or pass the page size you want."
        )
    return page_size
