"""Draws docs/pictures/transfer-model.png: modelled times by length of the prompt, and by block; needs matplotlib.

python docs/pictures/transfer_model.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sglang_dcp_block.transfer_model.counts import Way
from sglang_dcp_block.transfer_model.links import Link, presets
from sglang_dcp_block.transfer_model.tables import PAGE, milliseconds

OUT = Path(__file__).with_name("transfer-model.png")
TOKENS = [2**i for i in range(13, 21)]
BLOCKS = [2**i for i in range(7)]
WAYS = (
    ("token round-robin", Way.DIRECT, 1, "tab:red"),
    ("token round-robin, packed", Way.PACKED, 1, "tab:grey"),
    ("blocks of 16", Way.DIRECT, 16, "tab:olive"),
    ("blocks of 64", Way.DIRECT, 64, "tab:orange"),
    ("blocks of 64, grouped", Way.GROUPED, PAGE, "tab:blue"),
)


def by_tokens(panel: Any, link: Link) -> None:
    """Time over the prompt's length, in fresh pools."""
    for name, way, block, colour in WAYS:
        panel.plot(TOKENS, [milliseconds(link, way, tokens, block) for tokens in TOKENS], label=name, color=colour)
    panel.set(xscale="log", yscale="log", title=f"{link.name}, fresh pools", xlabel="tokens of the prompt")
    panel.set_xticks(TOKENS[::2], [f"{tokens // 1024}k" for tokens in TOKENS[::2]])
    panel.minorticks_off()


def by_block(panel: Any, link: Link) -> None:
    """Time of 128k tokens over the block."""
    tokens = 131072
    panel.plot(BLOCKS, [milliseconds(link, Way.DIRECT, tokens, block) for block in BLOCKS], "o-", color="tab:orange",
               label="as it lies")  # fmt: skip
    for scattered, line in ((False, "--"), (True, ":")):
        packed = milliseconds(link, Way.PACKED, tokens, 1, scattered=scattered)
        name = f"packed, {'scattered' if scattered else 'fresh'} pages"
        panel.axhline(packed, color="tab:grey", linestyle=line, label=name)
    panel.axhline(
        milliseconds(link, Way.GROUPED, tokens, PAGE), color="tab:blue", label="blocks of 64, grouped, fresh pages"
    )
    panel.set(xscale="log", yscale="log", title=f"{link.name}, 128k tokens", xlabel="tokens of a block")
    panel.set_xticks(BLOCKS, [str(block) for block in BLOCKS])
    panel.minorticks_off()


def main() -> None:
    """Draw and write."""
    links = [presets()[name] for name in ("rdma-400", "nvlink", "tcp-loopback")]
    figure = Figure(figsize=(14.5, 7.5), layout="constrained")
    panels = figure.subplots(2, len(links))
    for above, below, link in zip(*panels, links, strict=True):
        by_tokens(above, link)
        by_block(below, link)
    for row in panels:
        row[0].set_ylabel("ms to the fullest of 8 ranks, modelled")
        row[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    figure.suptitle(
        "A model, not a measurement: 61 MLA layers, rows of 1,152 bytes, DCP 8, pages of 64, chunks of 8,192"
    )
    figure.savefig(OUT, dpi=110)


if __name__ == "__main__":
    main()
