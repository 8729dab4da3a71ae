"""Real prefill and decode servers on the CPU: the same prompts, with KV sent by tokens and in grouped blocks."""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.record import Check, Result, Row
from benchmarks.timing import in_turns, spread
from sglang_dcp_block.cpu.checkpoints import CONFIGS, write_tiny
from sglang_dcp_block.cpu.smollm2 import cache_root
from sglang_dcp_block.demo.pd.client import Reply, ask_pair
from sglang_dcp_block.demo.pd.counters import Sent, parse, sent_between
from sglang_dcp_block.demo.pd.plan import BOOTSTRAP_PORT, DECODE, PREFILL
from sglang_dcp_block.demo.plan import Case, random_ids
from sglang_dcp_block.demo.report import TOLERANCE, answer_difference
from sglang_dcp_block.demo.run import built
from sglang_dcp_block.demo.servers import Server, free_port

P, PAGE, CHUNK, NEW_TOKENS, TIMEOUT = 2, 16, 256, 4, 1800.0
LENGTHS = (5, 100, 480)
TOKENS, GROUPED = "token round-robin", f"blocks of {PAGE}, grouped"
TRANSFER, REQUEST = "KV transfers, as the prefill server counts them", "request, from sending to the last token"
MODEL = (
    "--attention-backend", "flashinfer", "--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "2048",
    "--sleep-on-idle",
)  # fmt: skip
GROUP = ("--dcp-group-pages", str(P))

READING = f"""
One prefill server with `--dcp-group-pages {P}` and two decode servers of {P} ranks, one with token round-robin, one
with blocks of a page of {PAGE} tokens, over Mooncake TCP: real SGLang, a tiny random MLA model, kernels in Triton's
interpreter. Each prompt goes to both decode servers in turns, with the prefill server's cache emptied in between;
log-probabilities of the two must agree within {TOLERANCE:.0e} before anything counts. *segments* and *bytes* are of
one prompt, counted where they are handed to Mooncake.

Almost all of a request's time is the interpreter's, and the waiting decode server keeps a core busy meanwhile: this
shows that the whole works and what is sent, not what a GPU server gains.
"""


@contextmanager
def _servers() -> Iterator[tuple[Server, int, dict[str, Server]]]:
    """(prefill server, its bootstrap port, decode servers by way)."""
    port = free_port()
    cases = {
        "prefill": Case("prefill", 1, 1, None, PAGE, (*MODEL, *PREFILL, BOOTSTRAP_PORT, str(port), *GROUP)),
        TOKENS: Case("decode by tokens", P, P, None, PAGE, (*MODEL, *DECODE)),
        GROUPED: Case("decode in blocks", P, P, PAGE, PAGE, (*MODEL, *DECODE, *GROUP)),
    }
    model = built(partial(write_tiny, "mla", cache_root() / "tiny-mla"), "tiny random MLA model", Console(stderr=True))
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        started = {
            name: stack.enter_context(Server(case, model, Path(logs) / f"{index}.log"))
            for index, (name, case) in enumerate(cases.items())
        }
        yield started.pop("prefill"), port, started


class _Asked:
    """Sends prompts, and keeps what came back."""

    def __init__(self, prefill: Server, port: int, decodes: dict[str, Server]) -> None:
        self.prefill, self.port, self.decodes = prefill, port, decodes
        self.seeds = itertools.count()
        self.replies: dict[str, Reply] = {}
        self.sent: dict[str, list[Sent]] = defaultdict(list)
        self.prompt: tuple[int, ...] = ()

    def ask(self, way: str) -> None:
        (self.replies[way],) = ask_pair(self.prefill, self.decodes[way], self.port, [self.prompt], NEW_TOKENS, TIMEOUT)

    @contextmanager
    def around(self, way: str, round_: int) -> Iterator[None]:
        """An empty cache before, the counters and the answer after."""
        self.prefill.ask("/flush_cache", {}, TIMEOUT)
        before = self._counters()
        yield
        sent = sent_between(before, self._counters())
        if round_:
            self.sent[way].append(sent)
        if len(self.replies) == len(self.decodes):
            first, second = (reply.answer for reply in self.replies.values())
            if first.tokens != second.tokens or not answer_difference(first, second) <= TOLERANCE:
                raise AssertionError(f"expected equal answers of both decode servers, got {first} and {second}")

    def _counters(self) -> dict[tuple[str, str], float]:
        return parse(self.prefill.ask("/metrics").decode())


def measure(full: bool) -> Result:
    """Serve prompts of all lengths."""
    rows: list[Row] = []
    layers = CONFIGS["mla"]["num_hidden_layers"]
    with _servers() as (prefill, port, decodes):
        for tokens in LENGTHS:
            asked = _Asked(prefill, port, decodes)
            asked.prompt = random_ids(tokens)
            seconds = in_turns({way: partial(asked.ask, way) for way in decodes}, 7 if full else 3, around=asked.around)
            transfers = {way: spread([sent.seconds for sent in asked.sent[way]]) for way in decodes}
            requests = {way: spread(seconds[way]) for way in decodes}
            for what, spreads in ((TRANSFER, transfers), (REQUEST, requests)):
                for way, found in spreads.items():
                    sent = asked.sent[way][-1]
                    case = {"measured": what, "layers": layers, "tokens": tokens, "transfers": sent.transfers}
                    rows.append(Row(way, case, found, TOKENS, spreads[TOKENS].p50, sent.num_bytes, sent.segments))
    most = max((row.segments or 0) / (int(row.case["transfers"]) * layers) for row in rows if row.way == GROUPED)
    checks = (Check("segments a rank and layer of a chunk, grouped, at most over all prompts", most, 1, at_most=True),)
    return Result("end_to_end", "Prefill and decode servers, end to end", "s", READING, rows, checks)
