"""Long runs of free pages first: kernel, twin and an oracle that sorts lists of runs."""

import random

import pytest
import torch

from sglang_dcp_block.kernels import launch, long_runs
from sglang_dcp_block.kernels.long_runs import long_runs_first, long_runs_first_torch


def sorted_runs(pages: list[int]) -> list[int]:
    """Whole runs, the longest first, equal ones as they were."""
    runs: list[list[int]] = []
    for page in pages:
        if runs and runs[-1][-1] + 1 == page:
            runs[-1].append(page)
        else:
            runs.append([page])
    return [page for run in sorted(runs, key=len, reverse=True) for page in run]


def some_pages(rng: random.Random, num_pages: int) -> list[int]:
    """Ascending pages of a pool that is nearly empty, half full, or nearly full."""
    pool = range(1, max(2, int(num_pages * rng.choice([1.05, 2, 20]))) + 1)
    return sorted(rng.sample(pool, min(num_pages, len(pool))))


@pytest.mark.parametrize("tile", [4, 16])
@pytest.mark.parametrize("num_pages", [0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 40])
def test_kernel_twin_and_oracle_agree(num_pages: int, tile: int) -> None:
    rng = random.Random(f"{num_pages} {tile}")
    for _ in range(2):
        pages = some_pages(rng, num_pages)
        before = torch.tensor(pages, dtype=torch.int64)
        expected = sorted_runs(pages)
        assert long_runs_first(before, tile=tile).tolist() == expected
        assert long_runs_first_torch(before).tolist() == expected
        assert before.tolist() == pages, "the old list was written to"


@pytest.mark.parametrize(
    "pages", [range(1, 601), range(1, 1200, 2), [*range(1, 129), *range(130, 258), *range(300, 429)]]
)
def test_runs_over_tiles(pages) -> None:
    """One run over all tiles, none at all, and runs as long as a tile beside one that is a page longer."""
    assert long_runs_first(torch.tensor(list(pages)), tile=128).tolist() == sorted_runs(list(pages))


@pytest.mark.parametrize("base", [2**31 - 20, 2**32, 2**62])
def test_large_pages(base: int) -> None:
    pages = [base + page for page in (0, 2, 3, 7, 8, 9, 30)]
    assert long_runs_first(torch.tensor(pages)).tolist() == sorted_runs(pages)


def test_very_long_lists_take_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_runs, "MAX_PAGES", 3)
    monkeypatch.setattr(long_runs, "_long_runs_first_kernel", None)  # fails where it is launched
    assert long_runs_first(torch.tensor([1, 3, 4, 6])).tolist() == [3, 4, 1, 6]
    with pytest.raises(TypeError, match="NoneType"):
        long_runs_first(torch.tensor([1, 3, 4]))


def test_the_twin_runs_where_kernels_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(long_runs, "_long_runs_first_kernel", None)
    assert long_runs_first(torch.tensor([1, 3, 4])).tolist() == [3, 4, 1]


@pytest.mark.parametrize(
    ("pages", "error", "message"),
    [
        (torch.zeros(8), TypeError, "pages: expected torch.int64, got torch.float"),
        (torch.zeros(8, dtype=torch.int64)[::2], ValueError, "pages: expected stride 1"),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError, r"pages: expected 1 dimension\(s\)"),
    ],
)
def test_what_does_not_fit_is_refused(pages: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        long_runs_first(pages)
