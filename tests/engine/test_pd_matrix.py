"""Prefill -> decode, the long matrix: blocks and DCP sizes of both sides, the decode server's prefix cache, refusals."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from cases import PROMPTS, assert_nothing_lost, assert_same, token_list
from flavours import STOCK
from pd import HOST, Pair, assert_pages_come_back, role, said

pytestmark = pytest.mark.slow

PAGE = 8
UNEQUAL = "unequal blocks"
WORDS = {  # of what both refuse by themselves; other reasons are SGLang's own
    "plugin": {UNEQUAL: "expected equal block sizes at equal dcp sizes"},
    "native": {UNEQUAL: "PD requires equal --dcp-block-size at equal DCP sizes"},
}
# SGLang's heartbeat, which the series leaves alone, misses a prefill server that is back within two of its turns.
TELLS_RESTARTS = {"plugin": True, "native": False}


@pytest.fixture(scope="module")
def want(expected):
    return expected("mla")


@pytest.fixture(scope="module")
def prefill(start, want):
    with start(tp=1, **role("prefill")) as engine:
        yield engine


class TestOnePrefillServer:
    """DCP1 -> n, one prefill server for all of them; it needs no restart between decode servers of different layouts."""

    def test_stock_decode_server(self, start, prefill, want):
        """Token round-robin, as before."""
        with start(tp=2, dcp=2, of=STOCK, **role("decode")) as decode:
            Pair(prefill, decode).serves_in_blocks(want, 1)

    @pytest.mark.parametrize("block", [4, 2])
    def test_blocks_shorter_than_a_page(self, start, prefill, want, block):
        with start(tp=2, dcp=2, block=block, **role("decode")) as decode:
            Pair(prefill, decode).serves_in_blocks(want, block)

    def test_triton_decode_server(self, start, prefill, want):
        with start(tp=2, dcp=2, block=PAGE, **role("decode", attention_backend="triton")) as decode:
            Pair(prefill, decode).serves_in_blocks(want, PAGE)

    def test_prefix_cache_of_the_decode_server(self, start, prefill, want):
        """The decode server keeps what it has, so the transfer starts inside the request, at a whole round of blocks."""
        with start(tp=2, dcp=2, block=PAGE, **role("decode", disaggregation_decode_enable_radix_cache=True)) as decode:
            got = Pair(prefill, decode).serves_in_blocks(want, PAGE)
        assert got["cached"].cached >= 80, "the decode server reused nothing: the case tests nothing"


@pytest.mark.timeout(2400)  # eight ranks and a second prefill server
class TestEightRanks:
    @pytest.mark.parametrize("reuse", [False, True], ids=["no-prefix-cache", "prefix-cache"])
    def test_from_one_and_from_two_ranks(self, start, prefill, want, reuse):
        """Short requests leave ranks without KV; their transfers of nothing complete."""
        kwargs = role("decode", disaggregation_decode_enable_radix_cache=reuse)
        with start(tp=8, dcp=8, block=PAGE, **kwargs) as decode:
            Pair(prefill, decode).serves_in_blocks(want, PAGE)
            with start(tp=2, **role("prefill")) as two:
                Pair(two, decode).serves_in_blocks(want, PAGE)

    def test_eight_requests_at_once(self, start, prefill):
        prompts = [token_list(200 + i, length) for i, length in enumerate((5, 8, 9, 17, 40, 63, 64, 65))]
        with start(tp=1, model="mla", attention_backend="flashinfer") as engine:
            want = {str(i): c for i, c in enumerate(engine.generate(prompts, 7))}
        with start(tp=8, dcp=8, block=PAGE, **role("decode")) as decode:
            got = {str(i): c for i, c in enumerate(Pair(prefill, decode).generate(prompts, 7))}
            assert_same(got, want)
            assert_nothing_lost(decode.flush())
        assert_nothing_lost(prefill.flush())


class TestOneDecodeServer:
    """Prefill servers that a decode server with DCP 2 and blocks of a page may and may not take KV from."""

    @pytest.fixture(scope="class")
    def decode(self, start, want):
        with start(tp=2, dcp=2, block=PAGE, **role("decode")) as engine:
            yield engine

    def test_equal_dcp_and_block_sizes(self, start, decode, want):
        """Pages are copied as they are."""
        with start(tp=2, dcp=2, block=PAGE, **role("prefill")) as prefill:
            Pair(prefill, decode).serves_in_blocks(want, PAGE)

    @pytest.mark.parametrize(
        ("kwargs", "reason"),
        [
            ({"tp": 2, "dcp": 2, "block": 4}, UNEQUAL),
            ({"tp": 2, "dcp": 2}, UNEQUAL),
            ({"tp": 4, "dcp": 4, "block": PAGE}, "Unsupported PD DCP topology: 4 -> 2"),
            ({"tp": 1, "page_size": 16}, "page_size=16"),
        ],
        ids=["other-blocks", "token-round-robin", "other-dcp-size", "other-page-size"],
    )
    def test_refused_within_seconds(self, start, flavour, prefill, decode, want, kwargs, reason):
        with start(**role("prefill", **kwargs)) as other:
            began = time.monotonic()
            assert WORDS[flavour.name].get(reason, reason) in Pair(other, decode).refusal()
            assert time.monotonic() - began < 30
            assert_same(
                {"middle": Pair(prefill, decode).generate([PROMPTS["middle"]])[0]}, {"middle": want.answers["middle"]}
            )
            # Soon, since the refused server says that it sends nothing; one that had ended could not say so.
            assert_pages_come_back(decode, 15)

    def test_other_row_sizes(self, start, prefill, decode, want):
        """Rows of another model: an error of that prefill server's requests alone."""
        with start(overrides={"kv_lora_rank": 64}, **role("prefill", tp=1)) as other:
            assert "geometry differs" in Pair(other, decode).refusal()
        assert_same(
            {"middle": Pair(prefill, decode).generate([PROMPTS["middle"]])[0]}, {"middle": want.answers["middle"]}
        )

    def test_a_prefill_server_that_comes_back_without_the_plugin(self, start, flavour, decode, want):
        """At the address whose answer the decode server has cached; and comes back with it again."""
        address = role("prefill")
        with start(tp=1, **address) as first:
            Pair(first, decode).serves_in_blocks(want, PAGE)
        with self.restarted(start, flavour, decode, address, of=STOCK) as stock:
            assert "does not know blocks" in Pair(stock, decode).refusal()
        if not TELLS_RESTARTS[flavour.name]:
            self.await_losses(address, decode, 2)
        with start(tp=1, **address) as again:
            Pair(again, decode).serves_in_blocks(want, PAGE)

    def test_a_prefill_server_that_comes_back_with_the_plugin(self, start, flavour, decode, want):
        """Its new ranks are asked, also where it was back before SGLang missed it."""
        address = role("prefill")
        with start(tp=1, **address) as first:
            Pair(first, decode).serves_in_blocks(want, PAGE)
        with self.restarted(start, flavour, decode, address) as again:
            Pair(again, decode).serves_in_blocks(want, PAGE)

    @contextmanager
    def restarted(self, start, flavour, decode, address, **kwargs):
        """A prefill server at the address of one that has ended, which the decode server takes for another one."""
        if not TELLS_RESTARTS[flavour.name]:
            self.await_losses(address, decode, 1)
        with start(tp=1, **address, **kwargs) as server:
            self.await_losses(address, decode, 1)
            yield server

    @staticmethod
    def await_losses(address, decode, times):
        """Until both decode ranks have lost that many prefill servers at the address: two heartbeats, and some."""
        loss = (
            f"Lost connection with prefill instance (bootstrap_addr: {HOST}:{address['disaggregation_bootstrap_port']})"
        )
        deadline = time.monotonic() + 30
        while said(decode).count(loss) < 2 * times:
            assert time.monotonic() < deadline, "the decode server still takes the old prefill server for the new one"
            time.sleep(0.2)
