"""Prefill -> decode when something fails in mid-transfer: with an error, in time, and for the requests concerned alone.

Transfers of one segment a call, each of which takes a while, so that there is a middle.
"""

from __future__ import annotations

import json
import signal
import time

import pytest

from cases import PROMPTS, assert_same
from pd import Pair, assert_pages_come_back, completions, role, said
from session import EngineFailed

pytestmark = pytest.mark.slow

PAGE = 8
TRANSFER_TIMEOUT = 5  # seconds, of Mooncake; its smallest
PREFILL = {
    "DCP_BLOCK_LAB_TRANSFERS": "1",
    "MC_TRANSFER_TIMEOUT": str(TRANSFER_TIMEOUT),
    "SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES": "1",
    "SGLANG_FAILED_SESSION_PROBE_INTERVAL_S": "2",
}
HELD = 40  # seconds that a decode server keeps pages which may still be written: the least with this timeout
DECODE = {
    "MC_TRANSFER_TIMEOUT": str(TRANSFER_TIMEOUT),
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": str(HELD),
}
# What a decode server hears of an error of the transfer engine. SGLang names no status, the plugin does.
TOLD = {
    "plugin": "the transfer engine returned -1 in batch 1, which ended the transfer",
    "native": "Failed to send kv chunk of",
}
WORKS_AGAIN = 90  # seconds, on a machine that is busy with the tests themselves


@pytest.fixture(scope="module")
def want(expected):
    return expected("mla")


def kept_alive(start_one):
    """start_one() again whenever the last one has ended."""
    engines = []

    def live():
        if not engines or engines[-1].process.poll() is not None:
            engines.append(start_one())
        return engines[-1]

    yield live
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def prefill(start, want):
    yield from kept_alive(lambda: start(tp=1, environ=PREFILL, **role("prefill")))


@pytest.fixture(scope="module")
def decode(start, want):
    yield from kept_alive(lambda: start(tp=2, dcp=2, block=PAGE, environ=DECODE, **role("decode")))


@pytest.fixture
def pair(prefill, decode):
    pair = Pair(prefill(), decode())
    steer(pair)
    works_again(pair)
    yield pair
    if pair.prefill.process.poll() is None:
        steer(pair)


def steer(pair, **order):
    """What the prefill server's next transfers do; see dcp_block_lab.transfers."""
    (pair.prefill.folder / "transfers.json").write_text(json.dumps(order))


def until_in_mid_transfer(pair, calls=3):
    file = pair.prefill.folder / "transfers"
    file.unlink(missing_ok=True)
    deadline = time.monotonic() + 60
    while not file.exists() or len(file.read_text().splitlines()) < calls:
        assert time.monotonic() < deadline, "no transfer began"
        time.sleep(0.05)


def works_again(pair):
    """Seconds until a request succeeds; it must be right then, and before that end with an error."""
    began = time.monotonic()
    while True:
        pair.send([PROMPTS["middle"]])
        try:
            (answer,) = completions(pair.decode)
            completions(pair.prefill)
            return time.monotonic() - began, answer
        except EngineFailed:
            assert time.monotonic() - began < WORKS_AGAIN, pair.prefill.tail()
            fails(pair.prefill)
            time.sleep(0.5)


def fails(server):
    """The error that a request ends with; the server lives."""
    with pytest.raises(EngineFailed) as failure:
        completions(server)
    assert server.process.poll() is None, failure
    return str(failure.value).splitlines()[0]


def assert_right(answer, want):
    assert_same({"middle": answer}, {"middle": want.answers["middle"]})


def assert_recovers(pair, want):
    """The fault is over: requests succeed again, and no page is lost on either side."""
    steer(pair)
    seconds, answer = works_again(pair)
    assert_right(answer, want)
    print(f"works again after {seconds:.1f} s")
    assert_pages_come_back(pair.decode, HELD + 60)
    assert_pages_come_back(pair.prefill, HELD + 60)


def test_an_error_of_the_transfer_engine(pair, want, flavour):
    steer(pair, status=-1)
    pair.send([PROMPTS["middle"]])
    fails(pair.decode)
    fails(pair.prefill)
    assert TOLD[flavour.name] in said(pair.decode)
    assert_recovers(pair, want)


def test_a_decode_server_that_stops_for_longer_than_the_timeout(pair, want):
    steer(pair, seconds=0.3)
    pair.send([PROMPTS["middle"]])
    until_in_mid_transfer(pair)
    pair.decode.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        fails(pair.prefill)
        assert time.monotonic() - began < TRANSFER_TIMEOUT + 30
    finally:
        pair.decode.signal(signal.SIGCONT)
    fails(pair.decode)
    assert_recovers(pair, want)


def test_a_prefill_server_that_is_killed(pair, prefill, want):
    steer(pair, seconds=0.3)
    pair.send([PROMPTS["middle"]])
    until_in_mid_transfer(pair)
    pair.prefill.signal(signal.SIGKILL)
    began = time.monotonic()
    fails(pair.decode)
    assert time.monotonic() - began < 30
    assert "Lost connection with prefill instance" in said(pair.decode)
    pair.prefill.close()
    other = Pair(prefill(), pair.decode)
    assert_right(works_again(other)[1], want)
    assert_pages_come_back(pair.decode, HELD + 60)


def test_a_decode_server_that_is_killed(pair, decode, want):
    steer(pair, seconds=0.3)
    pair.send([PROMPTS["middle"]])
    until_in_mid_transfer(pair)
    pair.decode.signal(signal.SIGKILL)
    began = time.monotonic()
    fails(pair.prefill)
    assert time.monotonic() - began < TRANSFER_TIMEOUT + 30
    pair.decode.close()
    steer(pair)
    assert_pages_come_back(pair.prefill, HELD + 60)
    other = Pair(pair.prefill, decode())
    assert_right(works_again(other)[1], want)
