"""The command line of ``sglang-dcp-block doctor``."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from urllib.parse import SplitResult

from sglang_dcp_block import output
from sglang_dcp_block.doctor import (
    flags,
    libraries,
    pair,
    patch_points,
    plugin,
    ports,
    progress,
    report,
    server,
    versions,
)
from sglang_dcp_block.doctor.findings import Finding, Level, exit_status, ok, problem
from sglang_dcp_block.doctor.http import address
from sglang_dcp_block.doctor.progress import Say
from sglang_dcp_block.doctor.server import Server

PROGRAM = "sglang-dcp-block doctor"
PART = "all servers"  # heading of what is said of no single one
DESCRIPTION = """\
Look at this machine, and at the flags of a server to be started if there are any behind --; or, with --url, at running
servers: what they really use, and whether prefill and decode servers fit. Nothing is changed or started."""
EXAMPLES = """\
examples:
  sglang-dcp-block doctor
  sglang-dcp-block doctor -- --model-path MODEL --tp 8 --dcp-size 8 --dcp-block-size 64
  sglang-dcp-block doctor --url http://localhost:30000 --expect-block-size 64
  sglang-dcp-block doctor --url http://prefill:30000 --url http://decode:30000
  sglang-dcp-block doctor --json | jq '.findings[] | select(.level == "problem")'

exit status: 0 all well (there may be notes), 1 a problem, 2 wrong use, or output that cannot be written
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.usage = "sglang-dcp-block doctor [-h] [--json] [--verbose] [--url URL ... | -- SERVER FLAGS]"
    parser.add_argument(
        "--url", action="append", type=_url, default=[], metavar="URL", help="a running server to ask; again for more"
    )
    parser.add_argument(
        "--expect-block-size",
        type=_block_size,
        metavar="B",
        help="with --url: a problem unless there is a server that decodes, and each has blocks of B tokens (1: none)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=server.TIMEOUT_SECONDS,
        metavar="S",
        help="seconds for an answer (default 10)",
    )
    parser.add_argument("--api-key", type=_key, metavar="KEY", help="the servers' --api-key")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--verbose", action="store_true", help="list every patch point")
    parser.set_defaults(server_flags=[])  # what stands behind a lone --


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status."""
    if args.url and args.server_flags:
        return _misused("--url looks at running servers: expected no server flags beside it")
    if args.expect_block_size is not None and not args.url:
        return _misused("--expect-block-size asks a running server: expected --url beside it")
    with progress.looking(output.console(stderr=True)) as say:
        servers = [_asked(url, args, say) for url in args.url]
        findings = of_servers(servers, args.expect_block_size) if servers else of_machine(args.server_flags, say)
    names = [each.name for each in servers if each.was_read]
    rows = pair.rows(servers) if names else []
    if args.json:
        text = f"{report.as_json(findings, names, rows)}\n"
    else:
        text = output.rendered(output.console(), lambda on: report.show(on, findings, names, rows, args.verbose))
    return output.put(PROGRAM, text, exit_status(findings))


def _asked(url: SplitResult, args: argparse.Namespace, say: Say) -> Server:
    say(url.geturl())
    return server.look_at(url, args.timeout, args.api_key)


def of_machine(argv: list[str], say: Say = progress.silent) -> list[Finding]:
    """Everything about this machine, and about the flags of a server to be started here.

    Args:
        say: is told what is looked at: importing what a server imports takes seconds.
    """
    checked = None
    if argv:
        say("these flags, as SGLang resolves them")
        checked = flags.check(argv, has_sglang=importlib.util.find_spec("sglang") is not None)
    listens = dict(checked.ports) if checked else {"--port": ports.SERVER_PORT}
    say("versions and patch points")
    findings = [
        *versions.check(needed=checked.needs(os.environ) if checked else ()),
        *plugin.check(has_flags=checked is not None),
        *patch_points.check(),
    ]
    say("libraries and GPUs")
    return [
        *findings,
        *libraries.check(required=checked is not None and checked.exchanges_kv),
        *ports.check(listens, checked.host if checked else "127.0.0.1", required=checked is not None),
        *(checked.findings if checked else ()),
    ]


def of_servers(servers: list[Server], expected_block_size: int | None) -> list[Finding]:
    """Everything about running servers."""
    findings = [finding for each in servers for finding in each.findings]
    if expected_block_size is not None:
        decodes = [each for each in servers if each.was_read and each.mode != "prefill"]
        findings += [_expected(each, expected_block_size) for each in decodes] or [_not_judged(servers)]
    return findings + pair.check(servers)


def _not_judged(servers: list[Server]) -> Finding:
    """A script that asks for blocks must not pass because nobody could be asked."""
    got = ", ".join(each.mode if each.was_read else "one that was not read" for each in servers)
    if all(each.was_read for each in servers):
        advice = "Pass the --url of a decode server, too: a prefill server takes its block size from those it sends to."
    else:
        advice = "Mend what keeps it from being read, or pass the --url of a server that decodes."
    return problem(PART, "expected block size", f"not judged: expected a server that decodes, got {got}", advice)


def _expected(asked: Server, block_size: int) -> Finding:
    if any(finding.what == "layout" and finding.level is Level.PROBLEM for finding in asked.findings):
        return problem(asked.name, "expected block size", "not judged: its layout is unclear", "Mend its layout first.")
    got = asked.side.block_size
    if got == block_size:
        return ok(asked.name, "expected block size", f"{got}")
    advice = f"Start it with --dcp-block-size {block_size}, and look at what its log says about it."
    return problem(asked.name, "expected block size", f"expected {block_size}, got {got}", advice)


def _misused(text: str) -> int:
    print(f"{PROGRAM}: error: {text}", file=sys.stderr)
    return 2


def _url(text: str) -> SplitResult:
    try:
        return address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _key(text: str) -> str:
    if not (text.isascii() and text.isprintable()):  # a header takes nothing else; the error must not show a key
        raise argparse.ArgumentTypeError("expected printable ASCII characters, got others: a line end, say")
    return text


def _block_size(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a positive number of tokens, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 3600:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, below 3600, got {text!r}")
    return value
