"""A list of free pages, reordered so that what is taken next lies in few runs of neighbours.  Plain torch, no host sync."""

from __future__ import annotations

import torch


def fewest_gaps_first(pages: torch.Tensor, num_taken: int) -> torch.Tensor:
    """Move the ``num_taken`` successive entries with the fewest gaps between them to the front, the first such ones.

    Args:
        pages: ``[num_pages] int64``, each page once.
        num_taken: 1 to ``num_pages``.

    Returns:
        A new ``[num_pages]`` with the same pages, the others in their order.

    Raises:
        ValueError: ``num_taken`` is out of range.

    A dozen operators over ``num_pages`` entries, no host sync.

    >>> fewest_gaps_first(torch.tensor([2, 5, 6, 9, 10, 11]), 3).tolist()
    [9, 10, 11, 2, 5, 6]
    """
    num_pages = pages.shape[0]
    if not 1 <= num_taken <= num_pages:
        raise ValueError(f"num_taken: expected 1 to {num_pages} free pages, got {num_taken}")
    place = torch.arange(num_pages, device=pages.device)
    gaps_before = torch.zeros_like(pages)
    torch.cumsum(pages[1:] != pages[:-1] + 1, 0, out=gaps_before[1:])
    last = num_pages - num_taken
    gaps = gaps_before[num_taken - 1 :] - gaps_before[: last + 1]
    first = (gaps * num_pages + place[: last + 1]).amin() % num_pages  # argmin may give any of several
    rest = torch.where(place < first + num_taken, place - num_taken, place)
    return pages[torch.where(place < num_taken, place + first, rest)]
