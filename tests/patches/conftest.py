"""All cases of argument resolution, resolved once, as importing SGLang takes longer; and SGLang's real bootstrap server."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
import requests
from children import run_script
from fact_cases import FACTS, MODELS
from resolution_cases import TRITON, VARIABLE, cases_of, with_argv, with_keywords

from bootstrap import close
from hooking import hook
from sglang_dcp_block.cpu.checkpoints import write_tiny
from sglang_dcp_block.patches.pd_points import BOOTSTRAP_POINTS


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("resolution")
    model, yaml = str(write_tiny("gqa", folder / "gqa")), folder / "server.yaml"
    options = {"model-path": model, "device": "cpu", "tp-size": 2, "dcp-size": 2, "dcp-block-size": 16}
    yaml.write_text(json.dumps({**options, "skip-tokenizer-init": True}))
    order = {
        "excluded": {
            "flag": with_argv(model, "--dcp-block-size", "16"),
            "keyword": with_keywords(model, dcp_block_size=16),
            "variable": with_argv(model, *TRITON, environ={VARIABLE: "16"}),
        },
        "engine": {"model_path": model, "device": "cpu", "dcp_block_size": 16},
        "cases": cases_of(model, str(write_tiny("mla", folder / "mla")), str(yaml)),
        "facts": {
            "case": with_argv(model, "--dcp-block-size", "8"),
            "changes": {name: change for name, (change, _) in FACTS.items()},
        },
        "models": {},
    }
    for name, (config, _) in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": name, **config}))
        order["models"][name] = with_argv(str(folder / name), *TRITON, "--disable-radix-cache", dcp=1)
    return run_script("resolve_cases.py", order)


def register_rank(address: str, page_size: int = 8, port: int = 1) -> None:
    """Tell a bootstrap server of its one rank, which listens on ``port``."""
    row = dict.fromkeys(("attn_tp_size", "attn_cp_size", "attn_dp_size", "pp_size", "system_dp_size"), 1)
    row |= dict.fromkeys(("attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "pp_rank", "system_dp_rank"), 0)
    row |= {"rank_ip": "127.0.0.1", "rank_port": port, "page_size": page_size, "kv_cache_dtype": "auto",
            "load_balance_method": "auto", "decode_allocation_policy": "early"}  # fmt: skip
    requests.put(f"http://{address}/route", json=row, timeout=5).raise_for_status()


@pytest.fixture
def bootstrap(monkeypatch, unused_port):
    """bootstrap(knows_blocks) -> address of a real bootstrap server with one registered rank."""
    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    servers = []

    def start(knows_blocks: bool = True, page_size: int = 8) -> str:
        with monkeypatch.context() as patch:
            if knows_blocks:
                hook(patch, BOOTSTRAP_POINTS)
            servers.append(CommonKVBootstrapServer("127.0.0.1", port := unused_port()))
        address = f"127.0.0.1:{port}"
        deadline = time.monotonic() + 10
        while True:
            try:
                register_rank(address, page_size=page_size)
                return address
            except requests.ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    yield start
    for server in servers:
        close(server)


@pytest.fixture
def move_rank():
    """move_rank(address, port): the server's rank listens elsewhere, as one that was restarted does."""
    return lambda address, port: register_rank(address, port=port)


@pytest.fixture
def unused_port():
    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find
