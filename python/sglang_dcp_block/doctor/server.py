"""What a running server says that it uses: its ``/server_info``, and a prefill server's block capability."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult

from sglang_dcp_block.dcp import handshake, quarantine
from sglang_dcp_block.dcp.handshake import Capability, HandshakeError, Side
from sglang_dcp_block.doctor import metrics
from sglang_dcp_block.doctor.findings import Finding, note, ok, problem
from sglang_dcp_block.doctor.http import Unanswered, get_json
from sglang_dcp_block.patches import fingerprint

INFO = "/server_info"
TIMEOUT_SECONDS = 10.0

GetJson = Callable[[SplitResult, str], Any]

# What is read of /server_info: name -> type. Anything else is left alone: it may hold secrets.
FIELDS: dict[str, type] = {
    "version": str,
    "model_path": str,
    "disaggregation_mode": str,
    "tp_size": int,
    "dcp_size": int,
    "page_size": int,
    "attention_backend": str,
    "prefill_attention_backend": str,
    "decode_attention_backend": str,
    "kv_cache_dtype": str,
    "disaggregation_transfer_backend": str,
    "disaggregation_bootstrap_port": int,
    "enable_hierarchical_cache": bool,
    "enable_metrics": bool,
    "max_total_num_tokens": int,
    "dcp_block_size": int,
    "dcp_group_pages": int,
}
REQUIRED = ("version", "disaggregation_mode", "dcp_size", "page_size")
SIZES = ("tp_size", "dcp_size", "page_size", "dcp_block_size")
MODES = ("null", "prefill", "decode")
REPORT = "dcp_block"  # what its ranks are armed with
REPORT_FIELDS = {
    "block_size": int,
    "dcp_size": int,
    "page_size": int,
    "rows_per_rank": int,
    "num_ranks": int,
    "digest": str,
}


@dataclass(frozen=True, slots=True)
class Server:
    """One running server, as far as it could be read."""

    name: str  # heading of its findings: its URL
    findings: tuple[Finding, ...]
    values: Mapping[str, Any] = field(default_factory=dict)  # of FIELDS, where they were there and of their type
    capability: Capability | None = None  # of a prefill server
    report: Mapping[str, Any] = field(default_factory=dict)  # of the ranks of a server with blocks

    @property
    def was_read(self) -> bool:
        """Whether it told what it uses."""
        return bool(self.values)

    @property
    def mode(self) -> str:
        """``prefill``, ``decode``, or ``null`` for a server that does both."""
        return str(self.values.get("disaggregation_mode", "null"))

    @property
    def side(self) -> Side:
        """Its layout, as peers judge it."""
        values = self.values
        return Side(values["dcp_size"], values.get("dcp_block_size") or 1, values["page_size"])

    @property
    def plugin_digest(self) -> str | None:
        """Of the plugin's text in its schedulers, ``unknown`` where they do not say; None where none is armed."""
        if self.report:
            return str(self.report.get("plugin_digest") or "unknown")[:16]
        return (self.capability.plugin_digest or "unknown")[:16] if self.capability else None


def look_at(url: SplitResult, timeout: float = TIMEOUT_SECONDS, api_key: str | None = None) -> Server:
    """Ask one server; never raises.

    Args:
        timeout: seconds for each answer.
        api_key: SGLang's ``--api-key``, where the server has one.
    """
    name = url.geturl()
    try:
        info = get_json(url, INFO, timeout, api_key)
    except Unanswered as error:
        return Server(name, (problem(name, "server", str(error), _advice(error)),))
    values, findings = read_info(name, info)
    if not values:
        return Server(name, tuple(findings))
    capability = None
    if values["disaggregation_mode"] == "prefill" and str(values.get("disaggregation_transfer_backend")).startswith(
        "mooncake"
    ):
        capability, more = ask_capability(name, url, values, timeout)
        findings += more
    if values.get("enable_metrics"):
        is_counting = values["disaggregation_mode"] != "null" and bool(capability or info.get(REPORT))
        findings += metrics.check(name, url, timeout, api_key, is_counting=is_counting)
    elif values["disaggregation_mode"] != "null":
        advice = "Pass --enable-metrics, so that refusals and failed transfers can be seen and alerted on."
        findings.append(note(name, "counters", "off", advice))
    report = info.get(REPORT)
    return Server(name, tuple(findings), values, capability, report if isinstance(report, dict) else {})


def _advice(error: Unanswered) -> str:
    if error.advice:
        return error.advice
    if error.status in (401, 403):
        return "Pass the server's --api-key."
    if error.status == 404:
        return f"Pass the URL of an SGLang server: it answers {INFO}. A router does not; ask the servers behind it."
    status = error.status or 0
    if 300 <= status < 400:
        return "No redirect is followed: pass the URL of the server itself, with https:// where it asks for that."
    if status == 200 or status >= 500:
        return "A proxy may have answered: pass the server's own --host and --port, and look whether it is up."
    return "Look whether the server is up, and whether this is its --host and --port."


def read_info(name: str, info: object) -> tuple[dict[str, Any], list[Finding]]:
    """What the doctor knows of an answer to ``/server_info``, and findings about it; no values where it is unusable."""
    if not isinstance(info, dict):
        got = f"{INFO}: expected an object, got {type(info).__name__}"
        return {}, [problem(name, "server", got, "Pass the URL of an SGLang server.")]
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for key, kind in FIELDS.items():
        value = info.get(key)
        if value is None and key not in REQUIRED:
            continue
        if not _is(value, kind):
            wrong.append(f"{key}: expected {kind.__name__}, got {_shown(value)}")
        else:
            values[key] = value
    wrong += [f"{key}: expected 1 or more, got {values[key]}" for key in SIZES if values.get(key, 1) < 1]
    if (mode := values.get("disaggregation_mode", MODES[0])) not in MODES:
        wrong.append(f"disaggregation_mode: expected {', '.join(MODES[:-1])} or {MODES[-1]}, got {_shown(mode)}")
    if wrong:
        advice = "Pass the URL of an SGLang server; is a proxy in between?"
        return {}, [problem(name, "server", f"{INFO}: {'; '.join(wrong)}", advice)]
    return values, [_version(name, values["version"]), *_blocks(name, values, info.get(REPORT))]


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _can_be(value: object, kind: type) -> bool:
    """Whether it can be of a report, whose numbers are sizes."""
    return _is(value, kind) and not (isinstance(value, int) and value < 1)


def _shown(value: object) -> str:
    return repr(value)[:60]


def _version(name: str, version: str) -> Finding:
    known = sorted(fingerprint.known())
    if version in known:
        return ok(name, "SGLang", version)
    return note(name, "SGLang", f"{version}; the plugin here knows {' and '.join(known)}")


def _blocks(name: str, values: dict[str, Any], report: object) -> list[Finding]:
    """Whether it places KV in blocks, by its own report."""
    block_size, dcp_size = values.get("dcp_block_size"), values["dcp_size"]
    if block_size is None and report is None:
        return [
            note(name, "layout", "no DCP" if dcp_size == 1 else f"token round-robin over {dcp_size} ranks: no blocks")
        ]
    advice = "Look for other plugins in its log; the same sglang-dcp-block belongs on all of its nodes."
    if not isinstance(report, dict):
        return [problem(name, "layout", f"{REPORT}: expected the ranks' report, got {_shown(report)}", advice)]
    if wrong := [key for key, kind in REPORT_FIELDS.items() if not _can_be(report.get(key), kind)]:
        got = ", ".join(f"{key} {_shown(report.get(key))}" for key in wrong)
        return [problem(name, "layout", f"{REPORT}: expected the ranks' report, got {got}", advice)]
    told = (block_size, dcp_size, values["page_size"])
    armed = (report["block_size"], report["dcp_size"], report["page_size"])
    if told != armed:
        names = "block size, DCP size, page size"
        return [
            problem(name, "layout", f"its ranks are armed with {armed}, it was started with {told} ({names})", advice)
        ]
    layout = f"blocks of {armed[0]} tokens over {armed[1]} ranks, pages of {armed[2]}"
    pool = f"{report['rows_per_rank']:,} rows a rank; {report['num_ranks']} ranks report digest {report['digest'][:16]}"
    return [ok(name, "layout", f"{layout}; {pool}")]


def ask_capability(
    name: str, url: SplitResult, values: Mapping[str, Any], timeout: float
) -> tuple[Capability | None, list[Finding]]:
    """What a prefill server tells decode servers with blocks, asked as they do."""
    port = values.get("disaggregation_bootstrap_port", 0)
    host = f"[{url.hostname}]" if ":" in str(url.hostname) else url.hostname
    what = f"capability (port {port})"
    if not 0 < port < 1 << 16:
        return None, [problem(name, what, f"expected a port, got {port}", "Pass the URL of an SGLang server.")]
    bootstrap = SplitResult("http", f"{host}:{port}", "", "", "")
    try:
        capability = handshake.capability_from(get_json(bootstrap, handshake.ROUTE, timeout))
    except Unanswered as error:
        if error.status == 404:
            got = "does not know blocks: decode servers with blocks refuse it"
            return None, [note(name, what, got, "Install sglang-dcp-block beside its SGLang, and restart it.")]
        if error.status in (409, 503):
            advice = "Look for a plugin error in its log."
            return None, [problem(name, what, f"withheld: {error}", advice)]
        advice = "Decode servers must reach this port at this address, too: open it."
        return None, [problem(name, what, str(error), advice)]
    except HandshakeError as error:
        return None, [problem(name, what, f"not readable: {error}", "Install the same sglang-dcp-block on both sides.")]
    findings = []
    if (capability.dcp_size, capability.page_size) != (values["dcp_size"], values["page_size"]):
        got = f"{capability.side}, but {INFO} has DCP {values['dcp_size']}, pages of {values['page_size']}"
        findings.append(problem(name, what, got, "Another server answers on this port: look who listens there."))
    else:
        findings.append(ok(name, what, f"knows blocks, protocol {capability.protocol}, {capability.side}"))
    if capability.transfer_timeout_seconds is not None:
        seconds = quarantine.needed_seconds(capability.transfer_timeout_seconds)
        findings.append(ok(name, "time limit", f"decode servers keep pages of a failed transfer for {seconds} s"))
    return capability, findings
