"""Prefill and decode servers with blocks built in, with each other and with servers of the plugin: one wire, two speakers.

Needs the tree that ``python -m upstream patch`` makes, as ``test_native.py`` does.
"""

from __future__ import annotations

import os

import pytest

from flavours import FLAVOURS, STOCK, TREE
from pd import Pair, role

pytestmark = pytest.mark.skipif(
    os.environ.get("DCP_BLOCK_UNDER_TEST") != "native", reason="needs DCP_BLOCK_UNDER_TEST=native and the patched tree"
)

PAGE = 8
NATIVE, PLUGIN = FLAVOURS["native"], FLAVOURS["plugin"]


@pytest.fixture(scope="module")
def want(expected):
    return expected("mla")


@pytest.fixture(scope="module")
def native_decode(start, want):
    with start(tp=2, dcp=2, block=PAGE, of=NATIVE, **role("decode")) as engine:
        yield engine


@pytest.fixture(scope="module")
def native_prefill(start, want):
    with start(tp=1, of=NATIVE, **role("prefill")) as engine:
        yield engine


def test_both_built_in(native_prefill, native_decode, want):
    Pair(native_prefill, native_decode).serves_in_blocks(want, PAGE)
    for state in (*native_prefill.flush(), *native_decode.flush()):
        assert state["sglang"] == str(TREE / "python" / "sglang" / "__init__.py")
        assert state["plugin"] == [], "the plugin's patch points are loaded: it may be what served"


def test_a_plugin_prefill_server(start, native_decode, want):
    with start(tp=1, of=PLUGIN, **role("prefill")) as prefill:
        Pair(prefill, native_decode).serves_in_blocks(want, PAGE)


def test_a_stock_prefill_server_is_refused(start, native_prefill, native_decode, want):
    with start(tp=1, of=STOCK, **role("prefill")) as prefill:
        assert "does not know blocks" in Pair(prefill, native_decode).refusal()
    Pair(native_prefill, native_decode).serves_in_blocks(want, PAGE)


def test_a_plugin_decode_server(start, native_prefill, want):
    with start(tp=2, dcp=2, block=PAGE, of=PLUGIN, **role("decode")) as decode:
        Pair(native_prefill, decode).serves_in_blocks(want, PAGE)


def test_a_stock_decode_server(start, native_prefill, want):
    with start(tp=2, dcp=2, of=STOCK, **role("decode")) as decode:
        Pair(native_prefill, decode).serves_in_blocks(want, 1)
