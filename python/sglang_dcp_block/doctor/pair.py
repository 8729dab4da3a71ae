"""Servers side by side, and whether each prefill server may send to each decode server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dcp_block.dcp import handshake
from sglang_dcp_block.doctor.findings import Finding, note, ok, problem
from sglang_dcp_block.doctor.server import Server

PART = "prefill and decode"
NONE = "-"


def _backend(server: Server) -> str:
    values = server.values
    common = values.get("attention_backend")
    both = [values.get(f"{phase}_attention_backend") or common for phase in ("prefill", "decode")]
    return " and ".join(dict.fromkeys(map(str, both)))


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that servers use, side by side."""

    what: str
    cells: tuple[str, ...]  # one a server
    differs: bool  # where it should be the same on all of them that have it


# What is compared: name, how it is read, and whether it should be the same on a prefill and a decode server. Digests of
# patch points are not: the two are armed with other ones.
_COMPARED: tuple[tuple[str, Callable[[Server], Any], bool], ...] = (
    ("SGLang", lambda s: s.values.get("version"), True),
    ("plugin", lambda s: s.plugin_digest or NONE, True),
    ("model", lambda s: str(s.values.get("model_path", "?")).rstrip("/").rpartition("/")[2], True),
    ("mode", lambda s: s.mode, False),
    ("TP size", lambda s: s.values.get("tp_size"), False),
    ("DCP size", lambda s: s.side.dcp_size, False),
    ("page size", lambda s: s.side.page_size, True),
    ("block size", lambda s: s.side.block_size, False),
    ("grouped for", lambda s: s.values.get("dcp_group_pages") or NONE, False),
    ("KV cache type", lambda s: s.values.get("kv_cache_dtype"), True),
    ("attention", _backend, False),
    ("transfer", lambda s: str(s.values.get("disaggregation_transfer_backend")).removesuffix("_tcp"), True),
    ("HiCache", lambda s: "on" if s.values.get("enable_hierarchical_cache") else "off", False),
    ("capacity (tokens)", lambda s: s.values.get("max_total_num_tokens"), False),
)


_MUST_BE_EQUAL = ("plugin", "page size", "KV cache type", "transfer")
_INSTALL = "Install the same sglang-dcp-block on both, and restart what is older."


def rows(servers: Sequence[Server]) -> list[Row]:
    """The table of all servers that could be read."""
    read = [server for server in servers if server.was_read]
    result = []
    for what, value_of, same in _COMPARED:
        cells = tuple(str(value_of(server)) for server in read)
        result.append(Row(what, cells, same and len(set(cells) - {NONE}) > 1))
    return result


def check(servers: Sequence[Server]) -> list[Finding]:
    """Findings about pairs of servers; none where there is only one server."""
    if len(servers) < 2:
        return []
    read = [server for server in servers if server.was_read]
    prefills = [server for server in read if server.mode == "prefill"]
    decodes = [server for server in read if server.mode == "decode"]
    if len(read) == len(servers) and not (prefills and decodes):
        modes = ", ".join(server.mode for server in read)
        advice = "Pass the URL of a prefill and of a decode server, or of one server alone."
        return [problem(PART, "modes", f"expected a prefill and a decode server, got {modes}", advice)]
    return [finding for prefill in prefills for decode in decodes for finding in _pair(prefill, decode)]


def _pair(prefill: Server, decode: Server) -> list[Finding]:
    what = f"{prefill.name} -> {decode.name}"
    findings = [
        (problem if row.what in _MUST_BE_EQUAL else note)(
            PART,
            what,
            f"{row.what} differs: {row.cells[0]} and {row.cells[1]}",
            _INSTALL if row.what == "plugin" else f"Start both with the same {row.what}.",
        )
        for row in rows([prefill, decode])
        if row.differs
    ]
    blocks = decode.side.block_size > 1
    if blocks and prefill.capability is None:
        got = "the decode server has blocks, and the prefill server does not say that it knows them"
        advice = "Install sglang-dcp-block on the prefill server, and restart it; its own findings say more."
        findings.append(problem(PART, what, got, advice))
    elif reason := handshake.why_not(prefill.side, decode.side):
        got, _, advice = reason.partition(". ")
        findings.append(problem(PART, what, got, advice or "Start both with the same layout."))
    elif prefill.side.dcp_size not in (1, decode.side.dcp_size):
        got = f"DCP {prefill.side.dcp_size} to DCP {decode.side.dcp_size}: SGLang sends from DCP 1, or between equal sizes"
        findings.append(
            problem(PART, what, got, "Leave --dcp-size out on the prefill server, or give it the decode server's.")
        )
    findings += _grouping(what, prefill, decode)
    if not findings:
        layout = f"in blocks of {decode.side.block_size}" if blocks else "token by token"
        findings.append(ok(PART, what, f"may exchange KV, {layout}"))
    return findings


def _grouping(what: str, prefill: Server, decode: Server) -> list[Finding]:
    ranks, side = prefill.values.get("dcp_group_pages"), decode.side
    if not ranks or (ranks == side.dcp_size and side.block_size == side.page_size):
        return []
    got = f"pages are grouped for {ranks} decode ranks with blocks of a page; this one has {side}"
    return [
        note(
            PART,
            what,
            got,
            "Transfers are right, and take more segments: --dcp-group-pages is for one kind of decode server.",
        )
    ]
