"""The layout handshake: what is accepted, what is refused, and that nothing in between exists."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dcp_block.dcp import handshake
from sglang_dcp_block.dcp.handshake import Capability, HandshakeError, Side

CAPABILITY = Capability(handshake.PROTOCOL, 1, 1, 64, "abc")


@given(st.integers(1, 2**31 - 1), st.lists(st.binary(max_size=8)), st.lists(st.binary(max_size=8)))
def test_a_tagged_block_size_comes_back(block_size, before, after):
    assert handshake.block_size_in([*before, handshake.tagged(block_size), *after]) == block_size


def test_no_tag_is_token_round_robin():
    assert handshake.block_size_in([b"None", b"", b"block_size=8", b"xdcp_block_size=8"]) == 1


@pytest.mark.parametrize(
    "text", [b"", b"0", b"-1", b"+8", b"8.0", b" 8", b"8 ", b"0x10", b"1e3", b"auto", b"9" * 400, b"\xff", "٣".encode()]
)
def test_nonsense_behind_the_tag_is_refused(text):
    with pytest.raises(HandshakeError, match="expected a positive number of tokens"):
        handshake.block_size_in([handshake.TAG + text])


def test_two_block_sizes_are_refused():
    with pytest.raises(HandshakeError, match="expected one block size"):
        handshake.block_size_in([handshake.tagged(8), handshake.tagged(16)])


@given(st.lists(st.binary(max_size=40)))
def test_any_frames_give_a_size_or_an_error(frames):
    try:
        assert 0 < handshake.block_size_in(frames) < 2**31
    except HandshakeError:
        assert any(frame.startswith(handshake.TAG) for frame in frames)


def side(dcp=1, block=1, page=64):
    return Side(dcp, block, page)


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        (side(), side(), None),
        (side(), side(dcp=8), None),  # stock decode: token round-robin, as before
        (side(), side(dcp=8, block=64), None),
        (side(), side(dcp=8, block=4), None),
        (side(dcp=8, block=64), side(dcp=8, block=64), None),
        (side(dcp=8), side(dcp=8), None),
        (side(dcp=8, block=64), side(dcp=8, block=32), "equal block sizes"),
        (side(dcp=8), side(dcp=8, block=64), "equal block sizes"),
        (side(dcp=8, block=64), side(dcp=8), "equal block sizes"),
        (side(dcp=8), side(dcp=4), None),  # SGLang's own to refuse
        (side(page=32), side(dcp=8, block=32, page=64), "equal page sizes"),
        (side(), side(dcp=8, block=48), "divides its page size"),
    ],
)
def test_who_may_exchange(prefill, decode, reason):
    got = handshake.why_not(prefill, decode)
    assert (got is None) if reason is None else (reason in (got or "")), got


@pytest.mark.parametrize("timeout", [None, 1, 30, 2**31 - 1])
@pytest.mark.parametrize("plugin", [None, "abc"])
def test_a_capability_survives_the_wire(timeout, plugin):
    capability = dataclasses.replace(CAPABILITY, transfer_timeout_seconds=timeout, plugin_digest=plugin)
    assert handshake.capability_from(capability.as_json()) == capability


@pytest.mark.parametrize("name", ["transfer_timeout_seconds", "plugin_digest"])
def test_a_peer_that_does_not_tell_this_is_understood(name):
    """An older plugin."""
    told = CAPABILITY.as_json()
    del told[name]
    assert getattr(handshake.capability_from(told), name) is None


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": 2}, {"dcp_size": 0}, {"dcp_size": True}, {"block_size": "64"}, {"page_size": None},
        {"digest": 5}, {"block_size": 1.0}, {"transfer_timeout_seconds": 0}, {"transfer_timeout_seconds": -1},
        {"transfer_timeout_seconds": True}, {"transfer_timeout_seconds": "30"}, {"transfer_timeout_seconds": 30.0},
        {"transfer_timeout_seconds": [30]}, {"transfer_timeout_seconds": 2**31}, {"transfer_timeout_seconds": 10**400},
        {"dcp_size": 2**31}, {"page_size": 10**5000}, {"digest": "d" * 65},
        {"plugin_digest": 5}, {"plugin_digest": ["d"]}, {"plugin_digest": "d" * 65},
    ],
)  # fmt: skip
def test_other_capabilities_are_refused(change):
    with pytest.raises(HandshakeError, match="expected"):
        handshake.capability_from({**CAPABILITY.as_json(), **change})


@pytest.mark.parametrize("data", [None, [], "x", 5, {}])
def test_what_is_no_capability_is_refused(data):
    with pytest.raises(HandshakeError):
        handshake.capability_from(data)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(CAPABILITY.as_json())), inner),
)


@pytest.mark.parametrize(
    "name", [None, 0, "", "0", "0-0-0-0", "0-0-0-0-0-0", "a-0-0-0-0", "٠-0-0-0-0", "0-0-0-0-0\n", []]
)
def test_what_is_no_rank_is_refused(name):
    assert handshake.rank_from("0-3-0-12-1") == "0-3-0-12-1"
    with pytest.raises(HandshakeError, match="expected five numbers joined by '-', got "):
        handshake.rank_from(name)


@given(json_like)
def test_any_answer_gives_a_capability_or_an_error(data):
    with contextlib.suppress(HandshakeError):
        assert handshake.capability_from(data).protocol == handshake.PROTOCOL


@given(json_like | st.integers())
def test_any_timeout_gives_a_capability_or_an_error(timeout):
    with contextlib.suppress(HandshakeError):
        got = handshake.capability_from({**CAPABILITY.as_json(), "transfer_timeout_seconds": timeout})
        assert got.transfer_timeout_seconds is None or 0 < got.transfer_timeout_seconds < 2**31


def test_a_server_speaks_when_all_its_ranks_have():
    assert handshake.agreed({"0": CAPABILITY}, 2) is None
    assert handshake.agreed({"0": CAPABILITY, "1": CAPABILITY}, 2) == CAPABILITY
    assert handshake.agreed({}, 0) is None
    other = Capability(handshake.PROTOCOL, 1, 1, 64, "other")
    with pytest.raises(HandshakeError, match="prefill ranks disagree"):
        handshake.agreed({"0": CAPABILITY, "1": other}, 2)
