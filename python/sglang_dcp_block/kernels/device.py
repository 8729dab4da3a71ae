"""The block layout as Triton device functions.

P = dcp_size and B = block size, both ``tl.constexpr``: they are fixed for the life of a process.  All arguments are at
least 0 (kernels guard the padding value -1 themselves); on that domain Triton's truncating division and Python's
flooring one agree.  Results keep the integer type of the argument.  Law: equal to ``dcp/layout.py`` on every input.
"""

# Triton types device code; mypy cannot.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def owner(position, P: tl.constexpr, B: tl.constexpr):
    """The rank that holds a position."""
    return (position // B) % P


@triton.jit
def local_index(position, P: tl.constexpr, B: tl.constexpr):
    """A position's index among the positions of its owner; applied to a slot, its physical row."""
    return (position // (B * P)) * B + position % B


@triton.jit
def position_of(index, RANK: tl.constexpr, P: tl.constexpr, B: tl.constexpr):
    """The position of a rank's local index: inverse of (owner, local_index)."""
    return (index // B) * (B * P) + RANK * B + index % B


@triton.jit
def local_len(length, RANK: tl.constexpr, P: tl.constexpr, B: tl.constexpr):
    """How many of the positions [0, length) a rank holds."""
    tail = length % (P * B) - RANK * B
    return (length // (P * B)) * B + tl.minimum(tl.maximum(tail, 0), B)


@triton.jit
def placed_slot(slot, P: tl.constexpr, B: tl.constexpr):
    """The slot whose ``% P`` is the owner of ``slot`` and whose ``// P`` is its row."""
    return local_index(slot, P, B) * P + owner(slot, P, B)
