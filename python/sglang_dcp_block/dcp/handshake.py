"""What a prefill and a decode server tell each other about the layout, and when they may exchange KV.

Three messages, all ignored by a peer that knows nothing of blocks:

    prefill's capability   GET /dcp_layout beside the bootstrap server's routes: "I place by blocks, with these numbers"
    decode's registration  a tagged trailing frame: "send me blocks of B tokens"
    prefill's success      a tagged trailing frame: "these were blocks of B tokens"

A SGLang that has blocks built in (the patch series) says the second and the third alike.  Its decode server asks in the
query of SGLang's own topology route, and a prefill server answers there, beside the topology (:data:`FIELD`).

Plain functions over plain data; transport and SGLang's objects are the adapters' business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sglang_dcp_block.shown import shown

PROTOCOL = 1
ROUTE = "/dcp_layout"
MAX_BYTES = 1 << 16  # of a capability on the wire
MAX_NUMBER = 2**31 - 1
MAX_DIGEST = 64  # characters
MAX_RANKS = 1 << 16  # of a server
TAG = b"dcp_block_size="
TOPOLOGY_ROUTE = "/route"
FIELD = "dcp_block_size"  # in that route's query: "I have blocks of B tokens"; in its answer: "my own cache has"


class HandshakeError(ValueError):
    """A peer said something that is not this protocol."""


@dataclass(frozen=True, slots=True)
class Side:
    """One server's layout."""

    dcp_size: int
    block_size: int  # tokens; 1 is token round-robin
    page_size: int  # tokens, physical, per rank

    def __str__(self) -> str:
        return f"dcp size {self.dcp_size}, block size {self.block_size}, page size {self.page_size}"


def tagged(block_size: int) -> bytes:
    """The trailing frame that names a block size in tokens.

    >>> tagged(64)
    b'dcp_block_size=64'
    """
    return TAG + str(block_size).encode("ascii")


def block_size_in(frames: Iterable[bytes]) -> int:
    """The block size in tokens that a message names; 1 where it names none, as a peer without blocks does.

    Raises:
        HandshakeError: the tag is there and what follows is no positive number, or two frames disagree.
    Law: inverts :func:`tagged`, whatever other frames stand beside it.

    >>> block_size_in([b"None", b"127.0.0.1", b"dcp_block_size=64"]), block_size_in([b"None"])
    (64, 1)
    """
    found = {frame[len(TAG) :] for frame in frames if frame.startswith(TAG)}
    if len(found) > 1:
        raise HandshakeError(f"expected one block size, got {sorted(found)}")
    for text in found:
        if not text.isdigit() or not 0 < (value := int(text[:20])) < 2**31 or len(text) > 10:
            raise HandshakeError(f"expected a positive number of tokens behind {TAG.decode()}, got {text[:40]!r}")
        return value
    return 1


def why_not(prefill: Side, decode: Side) -> str | None:
    """Why these two may not exchange KV, or None where they may.

    Unequal DCP sizes other than 1 to n are SGLang's own to refuse.

    >>> why_not(Side(1, 1, 64), Side(8, 64, 64)) is None
    True
    """
    if decode.block_size > 1 and prefill.page_size != decode.page_size:
        return (
            f"expected equal page sizes, got {prefill.page_size} on prefill and {decode.page_size} on decode. "
            "Start both with the same --page-size."
        )
    if decode.page_size % decode.block_size:
        return (
            f"expected a decode block size that divides its page size {decode.page_size}, got {decode.block_size}. "
            "Change --dcp-block-size on the decode server."
        )
    if prefill.dcp_size == decode.dcp_size > 1 and prefill.block_size != decode.block_size:
        return (
            f"expected equal block sizes at equal dcp sizes, where pages are copied as they are; got {prefill} on prefill "
            f"and {decode} on decode. Start both with the same --dcp-block-size."
        )
    return None


@dataclass(frozen=True, slots=True)
class Capability:
    """What one prefill rank can do; all ranks of a server must say the same."""

    protocol: int
    dcp_size: int
    block_size: int  # tokens; of the prefill server's own cache
    page_size: int  # tokens
    digest: str  # of the armed patch points
    transfer_timeout_seconds: int | None = None  # until Mooncake gives up on a write there; None: it does not say
    plugin_digest: str | None = None  # of the plugin's text alone, for people who look at a pair; None: it does not say

    def as_json(self) -> dict[str, Any]:
        """Plain data for the wire."""
        return asdict(self)

    @property
    def side(self) -> Side:
        """The layout part."""
        return Side(self.dcp_size, self.block_size, self.page_size)


def capability_from(data: object) -> Capability:
    """Read a capability off the wire.

    Raises:
        HandshakeError: it is not one, or of another protocol.
    """
    if not isinstance(data, Mapping):
        raise HandshakeError(f"expected an object, got {type(data).__name__}")
    digest = _digest(data, "digest")
    protocol, dcp_size, block_size, page_size = (
        _positive(data, name) for name in ("protocol", "dcp_size", "block_size", "page_size")
    )
    if protocol != PROTOCOL:
        raise HandshakeError(f"expected protocol {PROTOCOL}, got {protocol}")
    timeout = None
    if data.get("transfer_timeout_seconds") is not None:
        timeout = _positive(data, "transfer_timeout_seconds")
    plugin_digest = None if data.get("plugin_digest") is None else _digest(data, "plugin_digest")
    return Capability(protocol, dcp_size, block_size, page_size, digest, timeout, plugin_digest)


def _digest(data: Mapping[str, object], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or len(value) > MAX_DIGEST:
        raise HandshakeError(f"{name}: expected a string of at most {MAX_DIGEST} characters, got {shown(value)}")
    return value


def _positive(data: Mapping[str, object], name: str) -> int:
    value = data.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_NUMBER:
        raise HandshakeError(f"{name}: expected a positive int of at most {MAX_NUMBER}, got {shown(value)}")
    return value


def rank_from(data: object) -> str:
    """Read the name that a prefill rank has in its report: its five ranks, of DP, attention DP, CP, TP and PP.

    Raises:
        HandshakeError: it is not one.

    >>> rank_from("0-0-0-1-0")
    '0-0-0-1-0'
    """
    if not isinstance(data, str) or not re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9}){4}", data):
        raise HandshakeError(f"rank: expected five numbers joined by '-', got {shown(data)}")
    return data


def knows_blocks(topology: object) -> bool:
    """Whether an answer of :data:`TOPOLOGY_ROUTE` to a query with :data:`FIELD` is of a SGLang that has blocks built in.

    >>> knows_blocks({"page_size": 64, "dcp_block_size": 1}), knows_blocks({"page_size": 64})
    (True, False)
    """
    value = topology.get(FIELD) if isinstance(topology, Mapping) else None
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def agreed(reports: Mapping[str, Capability], expected: int) -> Capability | None:
    """The one capability of a whole server, from its ranks' reports; None until all ``expected`` ranks have reported.

    Raises:
        HandshakeError: two ranks report different things.
    """
    different = set(reports.values())
    if len(different) > 1:
        raise HandshakeError(f"prefill ranks disagree: {sorted(map(str, different))}")
    return different.pop() if len(reports) >= expected > 0 else None
