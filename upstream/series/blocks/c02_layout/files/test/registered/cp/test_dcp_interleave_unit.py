"""Index math of DCP layouts with runs of tokens, against dealing them one by one."""

import unittest

import torch

from sglang.srt.layers.dcp.layout import (
    collapse_dcp_indices,
    get_dcp_lens,
    get_dcp_positions,
    localize_dcp_indices,
    maybe_dcp_kernel_indices,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

SHAPES = [(2, 1), (2, 4), (3, 2), (4, 1), (4, 8), (8, 3)]
NUM_TOKENS = 200


def deal(dcp_size, interleave_size):
    """Each rank's positions, dealt in runs as cards are."""
    hands = [[] for _ in range(dcp_size)]
    rank, left = 0, interleave_size
    for position in range(NUM_TOKENS):
        hands[rank].append(position)
        left -= 1
        if left == 0:
            rank, left = (rank + 1) % dcp_size, interleave_size
    return hands


def each_rank():
    for dcp_size, interleave_size in SHAPES:
        for rank, hand in enumerate(deal(dcp_size, interleave_size)):
            yield dcp_size, interleave_size, rank, hand


class TestDcpInterleave(unittest.TestCase):
    def test_positions_and_rows_of_a_rank(self):
        for dcp_size, interleave_size, rank, hand in each_rank():
            with self.subTest(
                dcp_size=dcp_size, interleave_size=interleave_size, rank=rank
            ):
                local = torch.arange(len(hand))
                positions = get_dcp_positions(local, dcp_size, rank, interleave_size)
                self.assertEqual(positions.tolist(), hand)
                rows = collapse_dcp_indices(
                    torch.tensor(hand), dcp_size, interleave_size
                )
                self.assertEqual(rows.tolist(), local.tolist())

    def test_lengths_of_any_chunk(self):
        for dcp_size, interleave_size, rank, hand in each_rank():
            with self.subTest(
                dcp_size=dcp_size, interleave_size=interleave_size, rank=rank
            ):
                for start in (0, 1, interleave_size, 37):
                    for length in (0, 1, interleave_size * dcp_size, 90):
                        want = sum(start <= p < start + length for p in hand)
                        got = get_dcp_lens(
                            torch.tensor([length]),
                            dcp_size,
                            rank,
                            torch.tensor([start]),
                            interleave_size,
                        )
                        self.assertEqual(got.tolist(), [want])

    def test_localized_indices(self):
        for dcp_size, interleave_size, rank, hand in each_rank():
            with self.subTest(
                dcp_size=dcp_size, interleave_size=interleave_size, rank=rank
            ):
                rows = {position: row for row, position in enumerate(hand)}
                for non_local in (-1, 0):
                    got = localize_dcp_indices(
                        torch.arange(-1, NUM_TOKENS),
                        dcp_size,
                        rank,
                        interleave_size,
                        non_local=non_local,
                    )
                    want = [rows.get(p, non_local) for p in range(-1, NUM_TOKENS)]
                    self.assertEqual(got.tolist(), want)

    def test_rows_of_a_run_of_slots(self):
        for dcp_size, interleave_size, rank, hand in each_rank():
            with self.subTest(
                dcp_size=dcp_size, interleave_size=interleave_size, rank=rank
            ):
                # Two pages in an order of their own; the run ends anywhere in the second.
                page = dcp_size * interleave_size * 2
                slots = torch.cat(
                    [torch.arange(page) + 3 * page, torch.arange(page) + page]
                )
                for length in range(page, 2 * page + 1):
                    got = maybe_dcp_kernel_indices(
                        slots[:length], dcp_size, rank, interleave_size
                    )
                    owned = [position for position in hand if position < length]
                    want = [
                        int(slots[position]) // page * (page // dcp_size)
                        + hand.index(position % page)
                        for position in owned
                    ]
                    self.assertEqual(got.tolist(), want)


if __name__ == "__main__":
    unittest.main()
