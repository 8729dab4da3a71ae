"""Grouping the next free pages by decode rank: kernel, twin and an oracle that sorts pages one by one."""

import random

import pytest
import torch

from sglang_dcp_block.kernels.group_pages import group_pages, group_pages_torch

TILE = 4  # several tiles and programs a request, also for short ones
SIZES = [(1, 4), (2, 1), (2, 8), (3, 5), (4, 64), (8, 8), (16, 2)]  # ranks, page size


def ceil_div(length: int, page_size: int) -> int:
    return -(-length // page_size)


def grouped_one_by_one(free: list[int], requests: list[tuple[int, int]], page_size: int, P: int) -> list[int]:
    """Deals the next pages of the list to rank 0, then to rank 1, ...; each logical page takes its own."""
    out, rest = [], list(free)
    for prefix, length in requests:
        logical = range(ceil_div(prefix, page_size), ceil_div(length, page_size))
        physical = {}
        for rank in range(P):
            for page in logical:
                if page % P == rank:
                    physical[page] = rest.pop(0)
        out += [physical[page] for page in logical]
    return out + rest


def some_requests(rng: random.Random, P: int, page_size: int) -> list[tuple[int, int]]:
    """Prefixes that end inside a page, chunks of nothing, of a token, of less than P pages and of many."""
    requests = []
    for pages in (0, 1, P - 1, 2 * P + 1, 19):
        prefix = rng.choice([0, rng.randrange(5 * P * page_size), rng.randrange(9) * page_size])
        requests.append((prefix, prefix + max(0, pages * page_size - rng.randrange(page_size))))
    rng.shuffle(requests)
    return requests


@pytest.mark.parametrize(("P", "page_size"), SIZES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kernel_twin_and_oracle_agree(P: int, page_size: int, dtype: torch.dtype) -> None:
    rng = random.Random(f"{P} {page_size}")
    for _ in range(2):
        requests = some_requests(rng, P, page_size)
        need = sum(ceil_div(end, page_size) - ceil_div(start, page_size) for start, end in requests)
        free = rng.sample(range(1, 4000), need + rng.choice([0, 1, 50]))
        prefix_lens, seq_lens = (torch.tensor(lens, dtype=dtype) for lens in zip(*requests, strict=True))
        expected = grouped_one_by_one(free, requests, page_size, P)
        before = torch.tensor(free)
        sizes = {"page_size": page_size, "dcp_size": P}
        out = group_pages(before, prefix_lens, seq_lens, tile=TILE, **sizes)
        assert out.tolist() == expected
        assert group_pages_torch(before, prefix_lens, seq_lens, **sizes).tolist() == expected
        assert before.tolist() == free, "the old list was written to"
        if P == 1:
            assert expected == free


def test_no_requests_and_no_pages() -> None:
    none, free = torch.empty(0, dtype=torch.int64), torch.arange(3)
    assert group_pages(free, none, none, page_size=4, dcp_size=2).tolist() == [0, 1, 2]
    assert group_pages(none, none, none, page_size=4, dcp_size=2).tolist() == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"free_pages": torch.zeros(8)}, TypeError, "free_pages: expected torch.int64, got torch.float"),
        ({"free_pages": torch.zeros(8, dtype=torch.int64)[::2]}, ValueError, "free_pages: expected stride 1"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, ValueError, "prefix_lens: expected 2 entries, one a request"),
        ({"prefix_lens": torch.zeros(1)}, TypeError, "prefix_lens: expected torch.int32 or torch.int64"),
        ({"page_size": 0}, ValueError, "page_size: expected 1 or more, got 0"),
        ({"dcp_size": 0}, ValueError, "dcp_size: expected 1 or more, got 0"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message) -> None:
    fitting = {
        "free_pages": torch.zeros(4, dtype=torch.int64),
        "prefix_lens": torch.zeros(1, dtype=torch.int64),
        "seq_lens": torch.ones(1, dtype=torch.int64),
        "page_size": 4,
        "dcp_size": 2,
    }
    group_pages(**fitting)
    with pytest.raises(error, match=message):
        group_pages(**{**fitting, **change})
