"""Oracles: the block round-robin layout, found by walking instead of by formula.

Blocks are dealt to ranks like cards, one after the other, with a counter per rank. Plain Python ints and lists, slow
and obvious on purpose: no division and no modulo, so that no formula of the code under test is repeated here.
P = dcp_size, B = block_size; positions and slots are walked alike; -1 is padding.
"""

from __future__ import annotations

from collections.abc import Iterator


def blocks(P: int, B: int) -> Iterator[tuple[int, int, int]]:
    """Deal blocks for ever: (first position, owner, local index of the first position)."""
    held_tokens = [0] * P
    position = 0
    while True:
        for rank in range(P):
            yield position, rank, held_tokens[rank]
            position += B
            held_tokens[rank] += B


def deal(length: int, P: int, B: int) -> list[tuple[int, int]]:
    """(owner, local index) of each of the positions 0 .. length-1."""
    dealt: list[tuple[int, int]] = []
    for _, rank, first_local in blocks(P, B):
        for offset in range(B):
            if len(dealt) >= length:
                return dealt
            dealt.append((rank, first_local + offset))
    raise AssertionError("blocks() never ends")


def owner(t: int, P: int, B: int) -> int:
    """The rank that holds position t; -1 for padding."""
    if t < 0:
        return -1
    return next(rank for first, rank, _ in blocks(P, B) if t < first + B)


def local_index(t: int, P: int, B: int) -> int:
    """The index of position t among its owner's tokens; -1 for padding."""
    if t < 0:
        return -1
    return next(first_local + (t - first) for first, _, first_local in blocks(P, B) if t < first + B)


def tokens_of(rank: int, length: int, P: int, B: int, start: int = 0) -> list[int]:
    """The positions in [start, start + length) that ``rank`` holds, in order."""
    tokens: list[int] = []
    for first, block_owner, _ in blocks(P, B):
        if first >= start + length:
            return tokens
        for t in range(first, first + B):
            if block_owner == rank and start <= t < start + length:
                tokens.append(t)
    raise AssertionError("blocks() never ends")


def local_len(length: int, rank: int, P: int, B: int, start: int = 0) -> int:
    """The number of tokens in [start, start + length) that ``rank`` holds."""
    return len(tokens_of(rank, length, P, B, start))


def runs(start: int, length: int, rank: int, P: int, B: int) -> list[tuple[int, int, int]]:
    """``rank``'s tokens in [start, start + length), joined while position and local index both go up by one.

    Each run is (position, local index, tokens).
    """
    found: list[tuple[int, int, int]] = []
    index = len(tokens_of(rank, start, P, B))  # this rank's tokens before the chunk
    for t in tokens_of(rank, length, P, B, start):
        if found and found[-1][0] + found[-1][2] == t and found[-1][1] + found[-1][2] == index:
            position, first_index, tokens = found[-1]
            found[-1] = (position, first_index, tokens + 1)
        else:
            found.append((t, index, 1))
        index += 1
    return found


def placed_order(num_cycles: int, P: int, B: int) -> list[int]:
    """The slots of whole cycles, ordered by placed slot: row by row, and in a row rank by rank."""
    num_slots = num_cycles * B * P
    rows_of = [tokens_of(rank, num_slots, P, B) for rank in range(P)]
    return [rows_of[rank][row] for row in range(num_cycles * B) for rank in range(P)]


def placed(slot: int, P: int, B: int) -> int:
    """Where ``slot`` goes so that a stock kernel (placed % P the owner, placed // P the row) writes it to its owner."""
    if slot < 0:
        return -1
    num_cycles = 1
    while num_cycles * B * P <= slot:
        num_cycles += 1
    return placed_order(num_cycles, P, B).index(slot)


def transfer_rows(
    src_pages: list[int],
    dst_pages: list[int],
    rank: int,
    P: int,
    B: int,
    page_size: int,
    prefix: int = 0,
    skipped_pages: int = 0,
    num_tokens: int | None = None,
) -> list[tuple[int, int]]:
    """(source row, destination row) of each token of a chunk that decode rank ``rank`` gets, in position order.

    The decode server holds ``prefix`` tokens already; the request's next ``skipped_pages`` source pages went before.
    """
    src_rows = [row for page in src_pages for row in range(page * page_size, page * page_size + page_size)]
    dst_rows = iter([row for page in dst_pages for row in range(page * page_size, page * page_size + page_size)])
    if num_tokens is not None:
        src_rows = src_rows[:num_tokens]
    first = prefix + skipped_pages * page_size
    pairs: list[tuple[int, int]] = []
    for t, (dealt_to, _) in enumerate(deal(first + len(src_rows), P, B)):
        if t < prefix or dealt_to != rank:
            continue
        dst_row = next(dst_rows)  # this rank's tokens behind the prefix fill its pages one by one
        if t >= first:
            pairs.append((src_rows[t - first], dst_row))
    return pairs


def replicated_rows(
    src_pages: list[int],
    dst_pages: list[int],
    P: int,
    page_size: int,
    skipped_pages: int = 0,
    num_tokens: int | None = None,
) -> list[tuple[int, int]]:
    """The same for a pool that holds every token on every rank, a virtual page of them in each destination page."""
    src_rows = [row for page in src_pages for row in range(page * page_size, page * page_size + page_size)]
    slots_in_page = sum(page_size for _ in range(P))
    slots = [slot for page in dst_pages for slot in range(page * slots_in_page, page * slots_in_page + slots_in_page)]
    for _ in range(skipped_pages):
        del slots[:page_size]
    if num_tokens is not None:
        src_rows = src_rows[:num_tokens]
    return list(zip(src_rows, slots, strict=False))


def joined_rows(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pairs as (source row, destination row, rows), while both go up by one."""
    found: list[tuple[int, int, int]] = []
    for src, dst in pairs:
        if found and found[-1][0] + found[-1][2] == src and found[-1][1] + found[-1][2] == dst:
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((src, dst, 1))
    return found
