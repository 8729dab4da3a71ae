"""What a server's flags resolve to, and what they are refused with.

Where SGLang is installed it resolves them itself, in a child process.  Elsewhere the flags that blocks depend on are read
here, with the model's config.json, and the rules of :mod:`sglang_dcp_block.support` are asked.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from sglang_dcp_block import config
from sglang_dcp_block.config import BlockSizeError
from sglang_dcp_block.cpu.environment import SWITCH
from sglang_dcp_block.doctor import child, ports
from sglang_dcp_block.doctor.findings import Finding, note, ok, problem
from sglang_dcp_block.shown import shown
from sglang_dcp_block.support import GQA_BACKENDS, MLA_BACKENDS, Facts, grouping_refusals, refusals

PART = "flags"
MAX_NUMBER = 2**31 - 1
TIMEOUT_SECONDS = 180  # importing SGLang and asking for a model's configuration
_COMMAND = "sglang_dcp_block.doctor.resolve"
_OF_FLASHINFER = frozenset({"flashinfer", "trtllm_mla", "cutedsl_mla"})
_OF_THE_MACHINE = ("RuntimeError", "ImportError", "ModuleNotFoundError", "AttributeError")
_NO_GPU = (
    "These are no words about flags: SGLang itself fails on this machine. If it has no GPU, look in the CPU environment: "
    "python -m sglang_dcp_block.cpu -- sglang-dcp-block doctor -- ..."
)
_CORRECT = "Correct the flags as it says; docs/operations.md has every message and its cause."


@dataclass(frozen=True, slots=True)
class Checked:
    """Findings about a command line, and what the other checks need of it."""

    findings: tuple[Finding, ...]
    mode: str = "null"  # of disaggregation
    host: str = "127.0.0.1"
    ports: tuple[tuple[str, int], ...] = ()  # flag and port
    backends: tuple[str, ...] = ()  # of attention

    @property
    def exchanges_kv(self) -> bool:
        """Whether this is a prefill or a decode server."""
        return self.mode in ("prefill", "decode")

    def needs(self, environ: Mapping[str, str]) -> frozenset[str]:
        """Which of ``flashinfer`` and ``mooncake`` this server cannot do without; the CPU environment has stand-ins."""
        needed = {"mooncake"} if self.exchanges_kv else set()
        if environ.get(SWITCH) != "1" and set(self.backends) & _OF_FLASHINFER:
            needed.add("flashinfer")
        return frozenset(needed)


def check(argv: Sequence[str], has_sglang: bool) -> Checked:
    """Ask SGLang if it is there, else the rules."""
    if finding := _no_flags(argv):
        return Checked((finding,))
    return by_sglang(argv) if has_sglang else by_rules(argv)


def _no_flags(argv: Sequence[str]) -> Finding | None:
    """A problem where this is more, or something else, than the flags of a server to be started."""
    words = list(takewhile(lambda word: not word.startswith("-"), argv))
    if words:
        advice = "Leave that out, as in: sglang-dcp-block doctor -- --model-path MODEL --tp 8"
        return problem(PART, "command line", f"expected flags only behind --, got {shown(' '.join(words))}", advice)
    for word in argv:
        if word in ("-h", "--help"):
            advice = "Leave it out. sglang serve --help lists SGLang's flags; docs/operations.md has those of blocks."
            return problem(PART, "command line", f"expected flags of a server to judge, got {word}", advice)
    return None


# --- SGLang itself -------------------------------------------------------------------------------------------------


def by_sglang(argv: Sequence[str], timeout: float = TIMEOUT_SECONDS) -> Checked:
    """Resolve the flags as ``sglang serve`` does, and say what came of them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.json"
        ending = child.run(["-m", _COMMAND, str(file)], timeout, stdin=json.dumps(list(argv)))
        try:
            outcome: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            got = f"SGLang did not resolve them: {ending.error or 'it wrote no outcome'}"
            advice = "Run `python -c 'import sglang.srt.server_args'`, and repair what it complains about."
            return Checked((problem(PART, "command line", got, advice),))
    return of_outcome(outcome, argv)


def of_outcome(outcome: dict[str, Any], argv: Sequence[str]) -> Checked:
    """Findings about what the child wrote."""
    warnings = tuple(note(PART, "warning at start", line) for line in outcome.get("warnings", ()))
    if "error" in outcome:
        return Checked((*warnings, problem(PART, "command line", outcome["error"], _advice(outcome))))
    sizes = (
        f"TP {outcome['tp_size']}, DCP {outcome['dcp_size']}, pages of {outcome['page_size']} tokens, "
        f"attention {' and '.join(dict.fromkeys(outcome['backends']))}, KV cache {outcome['kv_cache_dtype']}"
    )
    mode, port = outcome["disaggregation_mode"], outcome["port"]
    listens = [("--port", port)]
    if mode == "prefill" and outcome["disaggregation_bootstrap_port"] != port:
        listens.append(("--disaggregation-bootstrap-port", outcome["disaggregation_bootstrap_port"]))
    return Checked(
        (*warnings, _layout(outcome, mode), ok(PART, "resolved", sizes), *_grouping(outcome)),
        mode,
        outcome["host"],
        tuple(listens),
        tuple(outcome["backends"]),
    )


def _layout(outcome: dict[str, Any], mode: str) -> Finding:
    if outcome["block_size"]:
        return ok(PART, "layout", f"blocks of {outcome['block_size']} tokens over {outcome['dcp_size']} ranks")
    if mode == "prefill":
        return ok(PART, "layout", "a prefill server: each decode server names its own block size")
    layout = "token round-robin" if outcome["dcp_size"] > 1 else "no DCP"
    return note(PART, "layout", f"{layout}: SGLang runs as it is", f"Pass {config.FLAG} for blocks.")


def _grouping(outcome: dict[str, Any]) -> list[Finding]:
    ranks = outcome["group_pages"]
    return [ok(PART, "order of pages", f"grouped for {ranks} decode ranks")] if ranks else []


def _advice(outcome: Mapping[str, Any]) -> str:
    error = outcome["error"]
    if outcome.get("kind") in _OF_THE_MACHINE:
        return _NO_GPU
    if "unrecognized arguments" in error and (config.FLAG in error or config.GROUP_FLAG in error):
        return "SGLang did not load the plugin: see the heading `plugin`."
    return _CORRECT


# --- without SGLang ------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    """The flags that blocks depend on, as SGLang spells them."""
    parser = argparse.ArgumentParser(prog="doctor --", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--model-path", "--model", type=Path)
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=_size, default=1)
    parser.add_argument("--dcp-size", type=_size, default=1)
    parser.add_argument("--pp-size", "--pipeline-parallel-size", "--pp", type=_size, default=1)
    parser.add_argument("--page-size", type=_size)
    parser.add_argument("--attention-backend")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--speculative-algorithm")
    parser.add_argument("--disaggregation-mode", choices=("null", "prefill", "decode"), default="null")
    parser.add_argument("--disaggregation-transfer-backend", default="mooncake")
    parser.add_argument("--enable-hierarchical-cache", action="store_true")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=ports.SERVER_PORT)
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=ports.BOOTSTRAP_PORT)
    parser.add_argument(config.FLAG, config.ALIAS, dest="block_size")
    parser.add_argument(config.GROUP_FLAG, dest="group_pages")
    return parser


def _size(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_NUMBER)) and 1 <= int(text) <= MAX_NUMBER):
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {MAX_NUMBER}, got {shown(text)}")
    return int(text)


def by_rules(argv: Sequence[str]) -> Checked:
    """Read the flags that blocks depend on, and ask the rules.  What a model needs is read from a local config.json."""
    try:
        args, rest = _parser().parse_known_args(list(argv))
        grouped = None if args.group_pages is None else config.parse_group_pages(args.group_pages, config.GROUP_FLAG)
        facts, wants_blocks, told = _facts(args)
    except (argparse.ArgumentError, BlockSizeError, _ModelError) as error:
        return Checked((problem(PART, "command line", str(error), _CORRECT),))
    findings = []
    if wants_blocks and facts.leaves_blocks_to_others:
        findings, wants_blocks = [note(PART, "blocks", "ignored on a prefill server without DCP")], False
    lines = refusals(facts) if wants_blocks else []
    lines += grouping_refusals(facts, grouped) if grouped is not None else []
    findings += [problem(PART, "refused", *_split(line)) for line in lines]
    if not lines:
        what = f"blocks of {facts.block_size}" if wants_blocks else "no blocks"
        findings.append(
            ok(
                PART,
                "rules",
                f"{what}, pages of {facts.page_size} tokens, DCP {facts.dcp_size}: nothing stands against it",
            )
        )
    findings.append(
        note(PART, "not asked", f"{told}; SGLang is not installed here, so it has not resolved these flags")
    )
    if rest:
        findings.append(note(PART, "not read", " ".join(rest)[: child.MAX_TEXT]))
    listens = [("--port", args.port)]
    if args.disaggregation_mode == "prefill":
        listens.append(("--disaggregation-bootstrap-port", args.disaggregation_bootstrap_port))
    return Checked(tuple(findings), args.disaggregation_mode, args.host, tuple(listens), (facts.decode_backend,))


def _split(line: str) -> tuple[str, str]:
    """A refusal as what was found and what to do."""
    before, _, advice = line.partition(". ")
    return before, advice or _CORRECT


def _facts(args: argparse.Namespace) -> tuple[Facts, bool, str]:
    """The facts that the flags tell, whether they ask for blocks, and what was not asked for want of a model."""
    if args.block_size is None:
        request = config.from_environment(os.environ) or config.parse(1, config.FLAG)
    else:
        request = config.parse(args.block_size, config.FLAG)
    page_size = config.page_size_for(request, args.page_size) or 1
    model = _model(args.model_path)
    is_mla = bool(model.get("kv_lora_rank")) or args.attention_backend in set(MLA_BACKENDS) - set(GQA_BACKENDS)
    backend = args.attention_backend or (MLA_BACKENDS if is_mla else GQA_BACKENDS)[0]
    told = (
        "layers of the model that its configuration does not name" if model else "the model: its heads and its layers"
    )
    heads = int(model.get("num_attention_heads") or args.tp_size)
    return (
        Facts(
            block_size=config.block_size_for(request, page_size),
            page_size=page_size,
            dcp_size=args.dcp_size,
            tp_size=args.tp_size,
            platform="cuda",
            is_mla=is_mla,
            num_attention_heads=heads,
            num_kv_heads=int(model.get("num_key_value_heads") or heads) if model else 1,
            prefill_backend=backend,
            decode_backend=backend,
            kv_cache_dtype=args.kv_cache_dtype,
            pp_size=args.pp_size,
            speculative_algorithm=args.speculative_algorithm,
            disaggregation_mode=args.disaggregation_mode,
            transfer_backend=args.disaggregation_transfer_backend,
            hierarchical_cache=args.enable_hierarchical_cache,
        ),
        request.wants_blocks,
        told,
    )


class _ModelError(ValueError):
    """A configuration that is there, and is none."""


def _model(path: Path | None) -> dict[str, Any]:
    """A local model's configuration; empty where there is none, as for a name that only a hub knows.

    Raises:
        _ModelError: there is one, and it cannot be used.
    """
    if path is None:
        return {}
    file = path / "config.json"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except (IsADirectoryError, PermissionError) as error:
        raise _ModelError(f"{file}: expected a model's configuration, got: {error.strerror}") from error
    except (OSError, ValueError):
        return {}
    try:
        model = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _ModelError(f"{file}: expected a model's configuration, got: {error}") from error
    nested = model.get("text_config") if isinstance(model, dict) else None
    model = nested if isinstance(nested, dict) else model
    if not isinstance(model, dict):
        raise _ModelError(f"{file}: expected a model's configuration, got {shown(model)}")
    for name in ("num_attention_heads", "num_key_value_heads", "kv_lora_rank"):
        value = model.get(name)
        if value is not None and not (type(value) is int and 0 <= value <= MAX_NUMBER):
            raise _ModelError(f"{file}: {name}: expected a number from 0 to {MAX_NUMBER}, got {shown(value)}")
    return model
