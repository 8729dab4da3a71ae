"""The facts that rules ask follow SGLang's resolved arguments and the model's configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fact_cases import FACTS, MODELS

from sglang_dcp_block.support import Facts


class TestFacts:
    def test_base(self, answers: dict[str, Any]) -> None:
        assert answers["facts"]["base"] == dataclasses.asdict(
            Facts(
                block_size=8,
                page_size=8,
                dcp_size=2,
                tp_size=2,
                platform="cpu",
                is_mla=False,
                num_attention_heads=8,
                num_kv_heads=1,
                transfer_backend="mooncake",
            )
        )

    @pytest.mark.parametrize("name", FACTS)
    def test_follows_the_resolved_argument(self, answers: dict[str, Any], name: str) -> None:
        _, facts = FACTS[name]
        assert answers["facts"]["changes"][name] == facts

    @pytest.mark.parametrize("name", MODELS)
    def test_follows_the_model(self, answers: dict[str, Any], name: str) -> None:
        _, expected = MODELS[name]
        found = answers["models"][name]
        usual = {"num_attention_heads": 8, "num_kv_heads": 2, "block_size": 8}
        asked = [fact for fact in found if fact.startswith(("is_", "has_", "num_"))]
        assert {fact: found[fact] for fact in asked} == {
            fact: expected.get(fact, usual.get(fact, False)) for fact in asked
        }

    def test_each_is_seen_to_change(self) -> None:
        seen = {fact for cases in (FACTS, MODELS) for _, facts in cases.values() for fact in facts}
        assert {field.name for field in dataclasses.fields(Facts)} - seen == {"block_size"}
