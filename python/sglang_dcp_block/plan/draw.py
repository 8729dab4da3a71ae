"""A plan as a picture: rows of each rank, KV of a GPU, segments and modelled times. Needs matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from sglang_dcp_block.plan.show import label
from sglang_dcp_block.plan.whole import Plan


class NoMatplotlib(Exception):
    """Plots were asked for, and matplotlib is not installed."""


def write_png(plan: Plan, file: Path) -> None:
    """Draw into a file.

    Raises:
        NoMatplotlib: it does not load.
        OSError: the file cannot be written.
    """
    file.write_bytes(png(plan))


def png(plan: Plan) -> bytes:
    """The picture as the bytes of a PNG.

    Raises:
        NoMatplotlib: it does not load.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib(
            f"plots: expected matplotlib to load, got: {error}. Install it (pip install 'matplotlib>=3.8,<4'), "
            "or leave --png and --html out."
        ) from error
    figure = Figure(figsize=(12, 7), layout="constrained")
    panels = figure.subplots(2, 2).flat
    _balance(plan, panels[0])
    _memory(plan, panels[1])
    _bars(plan, panels[2], "segments, counted", [float(one.segments) for one in plan.sendings])
    _bars(plan, panels[3], "ms to the fullest rank, modelled", [1e3 * one.rank_seconds for one in plan.sendings])
    inputs = plan.inputs
    figure.suptitle(
        f"{inputs.shape.name}, TP {inputs.tp_size}, DCP {inputs.dcp_size}, {inputs.mix.name} "
        f"({inputs.mix.number:,} requests), {inputs.link.name}"
    )
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _balance(plan: Plan, panel: Any) -> None:
    shown = [("token round-robin", plan.by_tokens)]
    if plan.advice.block_size > 1:
        shown.append((f"blocks of {plan.advice.block_size}", plan.by_blocks))
    width = 0.8 / len(shown)
    for i, (name, balance) in enumerate(shown):
        places = [rank + (i - (len(shown) - 1) / 2) * width for rank in range(len(balance.rows))]
        panel.bar(places, balance.rows, width, label=f"{name}: max/mean {balance.imbalance:.3f}")
    panel.set(title="rows of each rank", xlabel="rank", xticks=range(len(plan.by_tokens.rows)))
    panel.legend(loc="lower left")


def _memory(plan: Plan, panel: Any) -> None:
    values = (plan.memory.tp_alone, plan.memory.mean, plan.memory.fullest)
    panel.bar(["TP alone", "DCP,\nmean", "DCP,\nfullest rank"], [value / 2**30 for value in values])
    panel.set(title="KV of all requests on one GPU", ylabel="GiB")


def _bars(plan: Plan, panel: Any, title: str, values: list[float]) -> None:
    if not values:
        panel.set_axis_off()
        panel.text(0, 0.5, "no transfers from a prefill server", transform=panel.transAxes)
        return
    colours = ["tab:orange" if one.name == plan.advice.sent else "tab:grey" for one in plan.sendings]
    bars = panel.barh([label(one) for one in plan.sendings], values, color=colours)
    panel.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3)
    panel.invert_yaxis()
    least, most = min(values) / 5, max(values)
    panel.set(
        title=title, xscale="log", xlim=(least, most * (most / least) ** 0.45)
    )  # room for the longest bar's number
