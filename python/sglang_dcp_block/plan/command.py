"""``sglang-dcp-block plan``: the command line over :func:`sglang_dcp_block.plan.whole.plan`."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sglang_dcp_block import output
from sglang_dcp_block.plan import mix
from sglang_dcp_block.plan.draw import NoMatplotlib, write_png
from sglang_dcp_block.plan.inputs import CHUNK_TOKENS, InputError, Inputs, default_backend, shape_of
from sglang_dcp_block.plan.page import write_html
from sglang_dcp_block.plan.show import show
from sglang_dcp_block.plan.to_json import as_json
from sglang_dcp_block.plan.whole import Plan, plan
from sglang_dcp_block.shown import shown
from sglang_dcp_block.support import GQA_BACKENDS, MLA_BACKENDS
from sglang_dcp_block.transfer_model import links
from sglang_dcp_block.transfer_model.shapes import DTYPE_BYTES, PRESETS

PROGRAM = "sglang-dcp-block plan"
DESCRIPTION = (
    "Recommend a block and a page size for a model, its requests and a link, with the figures behind it: KV of each GPU, "
    "balance of ranks, rounding of pages, segments and modelled seconds of transfers."
)
EXAMPLES = f"""\
examples:
  {PROGRAM} --model deepseek-v3 --tp 8 --dcp 8 --requests agent --link rdma-400
  {PROGRAM} --model ./config.json --tp 16 --dcp 8 --requests 4000+500:90,128000+1000:10 --page-size 64
  {PROGRAM} --model kimi-k2 --tp 8 --dcp 8 --requests trace.jsonl --link segment-us=1.4,gbytes=42 --json

Exit status: 0, or 2 for inputs that no plan can be made for, or output that cannot be written.
docs/plan.md says how to read the output.
"""
Read = TypeVar("Read")
_WIDTH = 120  # of tables where the terminal does not say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of this command."""
    backends = tuple(dict.fromkeys((*MLA_BACKENDS, *GQA_BACKENDS)))
    parser.add_argument("--model", required=True, help=f"a config.json, its folder, or one of {', '.join(PRESETS)}")
    parser.add_argument("--tp", type=_whole, required=True, metavar="N", help="TP size of the (decode) server")
    parser.add_argument("--dcp", type=_whole, required=True, metavar="P", help="DCP size of the (decode) server")
    parser.add_argument("--page-size", type=_whole, metavar="N", help="tokens; left out, one is recommended")
    parser.add_argument("--block-size", type=_whole, metavar="B", help="tokens; left out, one is recommended")
    parser.add_argument(
        "--requests",
        default="mixed",
        metavar="MIX",
        help=f"PROMPT+OUTPUT:NUMBER,...; a trace (.jsonl, .csv); or one of {', '.join(mix.PRESETS)} (default: mixed)",
    )
    parser.add_argument(
        "--link",
        default="rdma-400",
        help=f"one of {', '.join(links.presets())}, or segment-us=1.4,gbytes=42 (default: rdma-400)",
    )
    parser.add_argument("--kv-dtype", choices=tuple(DTYPE_BYTES), help="of the KV cache (default: the model's own)")
    parser.add_argument("--attention-backend", choices=backends, help="(default: what blocks take where none is named)")
    parser.add_argument(
        "--chunked-prefill-size",
        type=_whole,
        default=CHUNK_TOKENS,
        metavar="N",
        help=f"of the prefill server, in tokens (default: {CHUNK_TOKENS})",
    )
    parser.add_argument(
        "--pools", choices=("fresh", "scattered"), default="fresh", help="pages that follow each other, or none that do"
    )
    parser.add_argument(
        "--max-imbalance", type=_number, default=1.1, metavar="X", help="fullest rank over the mean (default: 1.1)"
    )
    parser.add_argument(
        "--max-rounding",
        type=_number,
        default=0.2,
        metavar="X",
        help="share of pages that holds nothing (default: 0.2)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a picture; needs matplotlib")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write one file with tables and picture; needs matplotlib"
    )


def _whole(text: str) -> int:
    """Read a whole number; which ones an option takes is checked with the other inputs."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, such as 8, got {shown(text)}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, such as 1.5, got {shown(text)}") from None


def inputs_of(args: argparse.Namespace) -> Inputs:
    """What the options ask for.

    Raises:
        InputError: an option that cannot be understood.
    """
    shape = shape_of(args.model, args.kv_dtype)
    for name, least in (("max_imbalance", 1.0), ("max_rounding", 0.0)):
        if not least <= getattr(args, name) < math.inf:
            raise InputError(
                f"--{name.replace('_', '-')}: expected a number, {least:g} or more, got {getattr(args, name)}"
            )
    return Inputs(
        shape=shape,
        tp_size=args.tp,
        dcp_size=args.dcp,
        mix=_understood("--requests", mix.read, args.requests),
        link=_understood("--link", links.parse, args.link),
        attention_backend=args.attention_backend or default_backend(shape),
        page_size=args.page_size,
        block_size=args.block_size,
        chunk_tokens=args.chunked_prefill_size,
        scattered=args.pools == "scattered",
        max_imbalance=args.max_imbalance,
        max_rounding=args.max_rounding,
    )


def _require_files(png: Path | None, html: Path | None) -> None:
    """Refuse names that would mislead, or write one file over the other.

    Raises:
        InputError: such a name.
    """
    if png is not None and png.suffix.lower() != ".png":
        raise InputError(f"--png: expected a name that ends in .png, got {png}. It writes nothing else.")
    if png is not None and html is not None and os.path.realpath(png) == os.path.realpath(html):
        raise InputError(f"--html: expected another file than --png {png}, got {html}. Name it .html.")


def _write(write: Callable[[Plan, Path], None], made: Plan, file: Path) -> None:
    try:
        write(made, file)
    except OSError as error:
        raise InputError(f"expected to write {file}, got: {error.strerror}") from error


def run(args: argparse.Namespace) -> int:
    """Make the plan and put it where the options say; returns the exit status."""
    try:
        _require_files(args.png, args.html)
        made = plan(inputs_of(args))
        for file, write in ((args.png, write_png), (args.html, write_html)):
            if file is not None:
                _write(write, made, file)
    except (InputError, NoMatplotlib) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return output.put(PROGRAM, f"{as_json(made)}\n" if args.json else _tables(made), 0)


def _tables(made: Plan) -> str:
    console = output.console()
    console = console if console.is_terminal else output.console(width=_WIDTH)
    return output.rendered(console, lambda on: show(made, on))


def _understood(option: str, read: Callable[[str], Read], text: str) -> Read:
    try:
        return read(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from error
