"""Random histories of a server's pages, with and without ``--dcp-group-pages``, against a model of who owns which page."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from hooking import hook
from page_histories import PageHistory, run
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.kernels import launch
from sglang_dcp_block.patches import active
from sglang_dcp_block.patches.group_points import DECODE_GROUP_POINTS, PREFILL_GROUP_POINTS

P, PAGE = 3, 4
MODES = {"stock": (), "prefill": PREFILL_GROUP_POINTS, "decode": DECODE_GROUP_POINTS}


class Physical(PageHistory):
    page_size = PAGE


class Virtual(PageHistory):
    page_size = PAGE * P


@pytest.fixture
def history(request, monkeypatch):
    """The hooks of a mode on SGLang's allocator; but for "kernels", these run as their twins, which is faster by far."""
    mode = request.param
    torch.set_num_threads(1)
    monkeypatch.setattr(launch, "INTERPRETED", mode == "kernels")
    monkeypatch.setattr(active, "group_pages", 0 if mode == "stock" else P)
    monkeypatch.setattr(active, "_layout", DcpLayout(P, PAGE) if mode == "decode" else None)
    hook(monkeypatch, PREFILL_GROUP_POINTS if mode == "kernels" else MODES[mode])
    return Virtual if mode == "decode" else Physical


@pytest.mark.parametrize("history", [*MODES, "kernels"], indirect=True)
def test_no_page_is_lost_or_shared(history) -> None:
    run(history, steps=240, in_a_history=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("history", MODES, indirect=True)
def test_no_page_is_lost_or_shared_in_ten_thousand_steps(history) -> None:
    run(history, steps=10_000, in_a_history=100)
