"""All cases of argument resolution, resolved once: importing SGLang takes longer than they do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from children import run_script
from fact_cases import FACTS, MODELS
from resolution_cases import TRITON, VARIABLE, cases_of, with_argv, with_keywords

from sglang_dcp_block.cpu.checkpoints import write_tiny


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
