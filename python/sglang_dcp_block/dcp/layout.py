"""Block round-robin layout: which rank owns a token, and at which local index.

Tokens are dealt to ranks like cards, ``block_size`` (B) at a time. With ``dcp_size`` (P) 4 and B = 4, a request reads::

    position        0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 | 16 17 18 19 | 20 ..
    owner              0    |    1    |     2     |      3      |      0      |   1
    local_index     0 1 2 3 | 0 1 2 3 | 0 1  2  3 |  0  1  2  3 |  4  5  6  7 |  4 ..
                    '----------------- one cycle = B*P tokens -----------------'

B = 1 is token round-robin. Positions and slots obey the same maps: what ``local_index`` is to a position, ``row`` is to
a slot, as long as a virtual page holds whole cycles.

Every map takes an ``int``, or an int32 or int64 NumPy array or torch tensor of any shape, and gives back the same kind,
dtype, shape and device. (A 0-d NumPy array comes back as a NumPy scalar, as from any NumPy operator.) Negative ids are
padding: owned by nobody, mapped to -1. Nothing is read back from a device, and no shape depends on data, so every map
of tensors is safe inside a CUDA graph: P, B and rank are constants of the graph. P and B may be any size; no
intermediate value leaves the dtype unless the result does.

The arithmetic is written once, with operators that ints, arrays and tensors share: torch is never imported.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar, overload

import numpy as np
import numpy.typing as npt

IntLike = TypeVar("IntLike", bound=SupportsIndex)  # an int, or an int32 or int64 NumPy array or torch tensor
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DcpLayout:
    """The layout of ``dcp_size`` ranks that own blocks of ``block_size`` tokens in turn.

    Args: two positive integers, kept as ``int``.
    Raises: ``ValueError`` for anything else, booleans included.

    >>> layout = DcpLayout(dcp_size=4, block_size=4)
    >>> [layout.local_len(24, rank) for rank in range(4)]
    [8, 8, 4, 4]
    """

    dcp_size: int
    block_size: int

    def __post_init__(self) -> None:
        for name in ("dcp_size", "block_size"):
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value!r}")
            object.__setattr__(self, name, int(value))

    @property
    def cycle(self) -> int:
        """Tokens after which the owners repeat: B*P."""
        return self.block_size * self.dcp_size

    def owner(self, pos: IntLike) -> IntLike:
        """Map a position (or a slot) to the rank that owns it.

        Rule: ``(pos // B) % P``; padding to -1.
        Args: ``pos`` ``[...]`` int, int32 or int64.
        Returns: ``[...]`` like ``pos``, in [-1, P).
        Raises: ``TypeError`` for other types and dtypes.
        Law: every position has exactly one owner; B = 1 gives ``pos % P``. CUDA-graph safe.

        >>> DcpLayout(4, 4).owner(np.array([0, 3, 4, 15, 16, -1]))
        array([ 0,  0,  1,  3,  0, -1])
        """
        return _with_padding(pos, self._owner(_guarded("pos", pos)))

    def local_index(self, pos: IntLike) -> IntLike:
        """Map a position to its index among its owner's tokens.

        Rule: ``(pos // (B*P)) * B + pos % B``; padding to -1.
        Args: ``pos`` ``[...]`` int, int32 or int64.
        Returns: ``[...]`` like ``pos``, -1 or more.
        Raises: ``TypeError`` for other types and dtypes.
        Law: ``(owner, local_index)`` is a bijection; each rank's indices, in position order, are 0, 1, 2, ... without a
        gap; B = 1 gives ``pos // P``. CUDA-graph safe.

        >>> DcpLayout(4, 4).local_index(np.array([0, 3, 4, 15, 16, -1]))
        array([ 0,  3,  0,  3,  4, -1])
        """
        return _with_padding(pos, self._local_index(_guarded("pos", pos)))

    def row(self, slot: IntLike) -> IntLike:
        """Map a slot to its row in its owner's buffer: ``local_index``, under the name that it has for slots.

        >>> DcpLayout(4, 4).row(21)
        5
        """
        return self.local_index(slot)

    def position(self, rank: int, local_index: IntLike) -> IntLike:
        """Map a rank's local index back to the position.

        Rule: ``(i // B) * B*P + rank*B + i % B`` for local index i; padding to -1.
        Args: ``rank`` in [0, P); ``local_index`` ``[...]`` int, int32 or int64.
        Returns: ``[...]`` like ``local_index``, -1 or more. A position beyond the dtype is not seen and wraps around.
        Raises: ``ValueError`` for a rank out of range; ``TypeError`` for other types and dtypes; ``OverflowError``
        where the dtype holds no position of this rank at all.
        Law: inverts ``(owner, local_index)``; increasing in ``local_index``. CUDA-graph safe.

        >>> DcpLayout(4, 4).position(1, np.array([0, 3, 4, -1]))
        array([ 4,  7, 20, -1])
        """
        rank = self._checked_rank(rank)
        index = _guarded("local_index", local_index)
        if (first := rank * self.block_size) > _top(index):
            raise OverflowError(f"local_index: expected a dtype that holds position {first}, got {index.dtype}")
        return _with_padding(local_index, self._position(rank, index))

    @overload
    def local_len(self, length: int, rank: int, start: IntLike) -> IntLike: ...

    @overload
    def local_len(self, length: IntLike, rank: int, start: IntLike | int = 0) -> IntLike: ...

    def local_len(self, length: Any, rank: int, start: Any = 0) -> Any:
        """Map the chunk [start, start + length) of a request to the number of its tokens that ``rank`` owns.

        Rule: ``count(start + length) - count(start)``, where ``count(N) = (N // (B*P)) * B + clamp(N % (B*P) - rank*B,
        0, B)``: whole cycles, then this rank's share of the last one.
        Args: ``length`` and ``start`` ``[...]`` int, int32 or int64, in tokens, of one shape or broadcast, also an int
        beside an array. ``start`` is the chunk's global position in its request: an int of any size, or an array whose
        sum with ``length`` fits the dtype. ``rank`` in [0, P).
        Returns: ``[...]`` tokens, like the array of the two.
        Raises: ``ValueError`` for a rank out of range and for negative ints; ``TypeError`` for other types and dtypes.
        Arrays are not checked (that would sync): their negative values, of padded requests, count as 0.
        Law: lengths sum to ``length`` over ranks; adjacent chunks add up; with ``start`` 0, no two ranks differ by more
        than B, and a lower rank never holds less. CUDA-graph safe.

        >>> DcpLayout(2, 64).local_len(np.array([64, 65, 0]), rank=1, start=np.array([96, 0, 7]))
        array([32,  1,  0])
        """
        rank = self._checked_rank(rank)
        length, start = _length("length", length), _length("start", start)
        if isinstance(start, int) and start == 0:
            return self._count(length, rank)
        if isinstance(start, int) and not isinstance(length, int):
            return self._count_from(start % self.cycle, length, rank)
        return self._count(start + length, rank) - self._count(start, rank)

    def max_local_len(self, length: IntLike) -> IntLike:
        """Map a request's length to the largest ``local_len`` over ranks, which is rank 0's (``start`` is 0).

        Arguments, errors and safety as ``local_len``.

        >>> DcpLayout(4, 4).max_local_len(np.array([0, 3, 16, 18]))
        array([0, 3, 4, 6])
        """
        return self.local_len(length, 0)

    def runs(self, start: int, length: int, rank: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Map the chunk [start, start + length) to the maximal runs of tokens that ``rank`` owns in it.

        Rule: a rank's tokens of a chunk are one range of local indices; cut it at the multiples of B. A run is
        contiguous in position and in local index. One rank (P = 1) owns everything, in one run.
        Args: ints, in tokens, not negative; ``rank`` in [0, P).
        Returns: (positions, local_indices, lengths), each ``[num_runs]`` int64: where each run begins, in both counts,
        and its tokens. Work and memory grow with the number of runs, never with tokens.
        Raises: ``ValueError`` for a rank out of range and for negative ints; ``TypeError`` for anything but ints;
        ``OverflowError`` for a chunk that ends beyond int64.
        Law: runs cover exactly this rank's tokens, in order; no two can be joined. Host only: not for CUDA graphs.

        >>> DcpLayout(4, 4).runs(start=2, length=17, rank=0)
        (array([ 2, 16]), array([2, 4]), array([2, 3]))
        """
        rank = self._checked_rank(rank)
        for name, value in (("start", start), ("length", length)):
            if not _is_int(value):
                raise TypeError(f"{name}: expected an int, got {_kind(value)}")
        start, length = _length("start", int(start)), _length("length", int(length))
        if start + length > np.iinfo(np.int64).max:
            raise OverflowError(f"chunk: expected an end within int64, got {start} + {length}")
        first, end = self._count(start, rank), self._count(start + length, rank)
        if first == end:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
        cut_blocks = (first // self.block_size + 1, -(-end // self.block_size)) if self.dcp_size > 1 else (0, 0)
        cuts = _mul(np.arange(*cut_blocks, dtype=np.int64), self.block_size)
        edges = np.concatenate((np.array([first], np.int64), cuts, np.array([end], np.int64)))
        return self._position(rank, edges[:-1]), edges[:-1], np.diff(edges)

    def slot_to_placed(self, slot: IntLike) -> IntLike:
        """Map a canonical slot to its placed slot: the permutation at the write door.

        Rule: ``row(slot) * P + owner(slot)``, so that stock write kernels, which take ``placed % P`` for the owner and
        ``placed // P`` for the row, put each token where this layout wants it; padding to -1.
        Args: ``slot`` ``[...]`` int, int32 or int64. The slot's whole cycle must fit the dtype.
        Returns: ``[...]`` like ``slot``, -1 or more.
        Raises: ``TypeError`` for other types and dtypes.
        Law: permutes every cycle within itself, hence every virtual page of whole cycles; slot 0 stays 0; B = 1 and
        P = 1 change nothing. CUDA-graph safe.

        >>> DcpLayout(2, 4).slot_to_placed(np.array([0, 1, 2, 3, 4, 5, 6, 7, -1]))
        array([ 0,  2,  4,  6,  1,  3,  5,  7, -1])
        """
        safe = _guarded("slot", slot)
        return _with_padding(slot, _mul(self._local_index(safe), self.dcp_size) + self._owner(safe))

    def placed_to_slot(self, placed: IntLike) -> IntLike:
        """Map a placed slot back to the canonical slot: the inverse of ``slot_to_placed``.

        Rule: ``position(placed % P, placed // P)``; padding to -1. The rest is as for ``slot_to_placed``.

        >>> DcpLayout(2, 4).placed_to_slot(np.array([0, 2, 4, 6, 1, 3, 5, 7, -1]))
        array([ 0,  1,  2,  3,  4,  5,  6,  7, -1])
        """
        safe = _guarded("placed", placed)
        return _with_padding(placed, self._position(_mod(safe, self.dcp_size), _div(safe, self.dcp_size)))

    # The formulas, on values that are guarded: nothing below sees a negative id.

    def _owner(self, pos: Any) -> Any:
        return _mod(_div(pos, self.block_size), self.dcp_size)

    def _local_index(self, pos: Any) -> Any:
        return _mul(_div(pos, self.cycle), self.block_size) + _mod(pos, self.block_size)

    def _position(self, rank: Any, index: Any) -> Any:
        # (i // B) * B*P + i % B, with one operation less: i, and P-1 foreign blocks for each whole block before it.
        foreign = _mul(_div(index, self.block_size), self.cycle - self.block_size)
        return index + foreign + _mul(rank, self.block_size)

    def _count(self, length: Any, rank: int) -> Any:
        # Ranks that begin beyond the dtype's largest value hold nothing: beginning at that value says the same.
        begin = min(rank * self.block_size, _top(length))
        whole = _mul(_div(length, self.cycle), self.block_size)
        return whole + _clamp(_mod(length, self.cycle) - begin, self.block_size)

    def _count_from(self, start: int, length: Any, rank: int) -> Any:
        # The same count for a start inside the first cycle, without their sum, which the dtype may not hold: whole cycles,
        # then what the rest shares with the two blocks of this rank that it can meet. Both are seen from start.
        count, rest = _mul(_div(length, self.cycle), self.block_size), _mod(length, self.cycle)
        for begin in (rank * self.block_size - start, rank * self.block_size - start + self.cycle):
            low, high = max(begin, 0), max(begin + self.block_size, 0)
            count = count + _clamp(rest - min(low, _top(length)), high - low)
        return count

    def _checked_rank(self, rank: int) -> int:
        if not _is_int(rank) or not 0 <= rank < self.dcp_size:
            raise ValueError(f"rank: expected an integer in [0, {self.dcp_size}), got {rank!r}")
        return int(rank)


# What ints, NumPy arrays and torch tensors need in order to share one formula.


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _kind(value: object) -> str:
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ if dtype is None else f"{type(value).__name__} of {dtype}"


@functools.cache
def _dtype_top(dtype: object) -> int | None:
    """The largest value of a NumPy or torch dtype; None for a dtype that holds no ids."""
    return {"int32": 2**31 - 1, "int64": 2**63 - 1}.get(str(dtype).removeprefix("torch."))


def _top(value: Any) -> Any:
    """The largest value that ``value``'s type holds: infinity for an int."""
    return math.inf if isinstance(value, int) else _dtype_top(value.dtype)


def _guarded(name: str, ids: Any) -> Any:
    """``ids`` with 0 for padding, so that no modulo sees a negative value; ``TypeError`` for what is no id."""
    if isinstance(ids, int) and not isinstance(ids, bool):
        return max(ids, 0)
    if _dtype_top(getattr(ids, "dtype", None)) is None:
        raise TypeError(f"{name}: expected an int, or an int32 or int64 array or tensor, got {_kind(ids)}")
    return ids.clip(0)


def _with_padding(ids: IntLike, mapped: Any) -> IntLike:
    """``mapped``, with -1 where ``ids`` is negative: an OR with the sign bit spread over all bits."""
    padding: Any = -(ids < 0) if isinstance(ids, int) else ids >> _top(ids).bit_length()
    result: IntLike = mapped | padding
    return result


def _length(name: str, tokens: Any) -> Any:
    if _is_int(tokens) and tokens < 0:
        raise ValueError(f"{name}: expected 0 or more tokens, got {tokens}")
    return _guarded(name, tokens)


def _clamp(value: Any, high: int) -> Any:
    return min(max(value, 0), high) if isinstance(value, int) else value.clip(0, min(high, _top(value)))


# ``value`` >= 0 against a Python int of any size: one beyond the dtype would raise in NumPy and wrap around in torch.


def _div(value: Any, divisor: int) -> Any:
    return value // divisor if divisor <= _top(value) else value * 0


def _mod(value: Any, divisor: int) -> Any:
    return value % divisor if divisor <= _top(value) else value


def _mul(value: Any, factor: int) -> Any:
    return value * factor if factor <= _top(value) else value * 0  # the product fits only where value is 0
