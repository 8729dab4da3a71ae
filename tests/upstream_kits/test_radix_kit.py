"""Upstream's own fixtures of the unified radix cache, which ship in the wheel: insert, match, split and evict."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from sglang.test.kits.unified_radix_cache.mixins import UnifiedRadixCacheFixtures


class Driver(UnifiedRadixCacheFixtures):
    """A cache of one configuration."""

    def __init__(self, page_size):
        self.cfg = CacheConfig(page_size=page_size, num_layers=1, full_attention_layer_ids=(0,))
        self.cache, self.allocator, self.pool = build_fixture(self.cfg)

    def insert(self, tokens):
        return self._insert(self.cache, self.allocator, self.pool, tokens)

    def matched(self, tokens):
        return match_prefix(self.cache, tokens).device_prefix_len


@pytest.fixture(params=[1, 4, 16])
def driver(request):
    return Driver(request.param)


def test_what_was_inserted_is_found(driver):
    tokens = driver._make_seq(1, 6)
    driver.insert(tokens)
    assert driver.matched(tokens) == len(tokens)
    assert driver.matched(tokens[: 2 * driver.cfg.page_size]) == 2 * driver.cfg.page_size
    assert driver.matched([0, *tokens]) == 0


def test_a_branch_shares_the_pages_before_it(driver):
    tokens, page = driver._make_seq(1, 6), driver.cfg.page_size
    driver.insert(tokens)
    branch = [*tokens[: 3 * page], *range(900, 900 + 2 * page)]
    assert driver.matched(branch) == 3 * page
    driver.insert(branch)
    assert driver.matched(branch) == len(branch)
    assert driver.matched(tokens) == len(tokens)


def test_eviction_gives_every_page_back(driver):
    before = driver.allocator.available_size()
    tokens = driver._make_seq(1, 6)
    driver.insert(tokens)
    assert driver.allocator.available_size() == before - len(tokens)
    driver.cache.evict(EvictParams(num_tokens=len(tokens)))
    assert driver.allocator.available_size() == before
    assert driver.matched(tokens) == 0
