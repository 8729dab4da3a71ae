"""The doctor on the answers of running servers, each alone and as pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from doctor_servers import CAPABILITY, DECODE, PREFILL, REPORT, STOCK, ZERO, Answer, Fake, looked_at, problems, send

from sglang_dcp_block.doctor import pair, server
from sglang_dcp_block.doctor.findings import Level
from sglang_dcp_block.doctor.http import address
from sglang_dcp_block.doctor.server import Server


class TestGoodAnswers:
    def test_a_server_with_blocks(self, sglang: Callable[..., Fake]) -> None:
        found = looked_at(sglang({**DECODE, "enable_metrics": True}, metrics=send(ZERO)))
        assert {finding.level for finding in found.findings} == {Level.OK}
        assert "blocks of 16 tokens over 2 ranks, pages of 16; 1,024 rows a rank" in found.findings[1].got
        assert found.mode == "decode"
        assert found.side.block_size == 16

    @pytest.mark.parametrize(("dcp_size", "text"), [(1, "no DCP"), (2, "token round-robin over 2 ranks: no blocks")])
    def test_a_server_without(self, dcp_size: int, text: str, sglang: Callable[..., Fake]) -> None:
        info = {**DECODE, "dcp_size": dcp_size, "disaggregation_mode": "null"}
        del info["dcp_block"], info["dcp_block_size"]
        found = looked_at(sglang(info))
        assert [(f.level, f.got) for f in found.findings[1:]] == [(Level.NOTE, text)]
        assert found.side.block_size == 1

    def test_an_unknown_sglang_is_noted(self, sglang: Callable[..., Fake]) -> None:
        finding = looked_at(sglang({**DECODE, "version": "0.5.99"})).findings[0]
        assert (finding.level, finding.got) == (Level.NOTE, "0.5.99; the plugin here knows 0.5.23")

    def test_counters_that_are_not_zero_are_told(self, sglang: Callable[..., Fake]) -> None:
        text = (
            "# HELP sglang:dcp_block_refusals_total x\n"
            'sglang:dcp_block_refusals_total{reason="layout",side="decode"} 2.0\n'
            'sglang:dcp_block_refusals_total{side="decode",reason="layout",x="1"} 1.0\n'
            'sglang:dcp_block_refusals_total{reason="no_blocks",side="decode"} 0.0\n'
            'sglang:dcp_block_transfer_failures_total{reason="transport"} 4.0\n'
            'sglang:dcp_block_transfer_failures_total{reason="transport"} 1e.\n'
        )
        found = looked_at(sglang({**DECODE, "enable_metrics": True}, metrics=send(text.encode())))
        assert found.findings[-1].got == "refused (decode layout): 3, failed transfers (transport): 4"
        off = looked_at(sglang(DECODE))
        assert (off.findings[-1].level, off.findings[-1].got) == (Level.NOTE, "off")
        quiet = looked_at(sglang({**DECODE, "enable_metrics": True}, metrics=send(ZERO)))
        assert quiet.findings[-1].level is Level.OK

    def test_counters_that_are_not_there_are_told(self, sglang: Callable[..., Fake]) -> None:
        """They begin with 0; a server without the plugin between its peers has none."""
        found = looked_at(sglang({**DECODE, "enable_metrics": True}, metrics=send(b"other 1\n")))
        assert (found.findings[-1].level, found.findings[-1].got) == (Level.NOTE, "the plugin's are not there")
        assert "an error in the server's log" in found.findings[-1].advice

    @pytest.mark.parametrize("metrics", [send(b"other 1\n"), send({"sglang:dcp_block_refusals_total": 0}), send(b"")])
    def test_no_counters_are_not_taken_for_counters_at_0(self, metrics: Answer, sglang: Callable[..., Fake]) -> None:
        """A server alone has none, nor has stock SGLang."""
        stock = {**STOCK, "enable_metrics": True}
        for info in ({**DECODE, "disaggregation_mode": "null", "enable_metrics": True}, stock):
            finding = looked_at(sglang(info, metrics=metrics)).findings[-1]
            assert (finding.level, finding.got) == (Level.NOTE, "the plugin's are not there")
            assert finding.advice.startswith("Nothing is counted here")

    def test_the_key_is_sent_to_the_server(self, sglang: Callable[..., Fake]) -> None:
        asked = sglang(DECODE)
        looked_at(asked, api_key="k")
        assert asked.asked == [("/server_info", "Bearer k")]

    def test_a_prefix_of_the_url_is_kept(self, fake: Callable[..., Fake]) -> None:
        answers = fake({"/one/server_info": send(DECODE)})
        assert server.look_at(address(f"http://127.0.0.1:{answers.port}/one/"), 5.0).was_read


class TestPairs:
    def both(
        self, sglang: Callable[..., Fake], prefill: dict[str, Any], decode: dict[str, Any], **capability: Any
    ) -> Any:
        answer = send({**CAPABILITY, **capability})
        return [looked_at(sglang({**PREFILL, **prefill}, answer)), looked_at(sglang({**DECODE, **decode}))]

    def test_a_pair_that_fits(self, sglang: Callable[..., Fake]) -> None:
        servers = self.both(sglang, {}, {})
        (finding,) = pair.check(servers)
        assert (finding.level, finding.got) == (Level.OK, "may exchange KV, in blocks of 16")
        assert not any(row.differs for row in pair.rows(servers))

    @pytest.mark.parametrize(
        ("prefill", "decode", "level", "text"),
        [
            ({"page_size": 64}, {}, Level.PROBLEM, "page size differs: 64 and 16"),
            ({"page_size": 64}, {}, Level.PROBLEM, "expected equal page sizes, got 64 on prefill and 16 on decode"),
            ({"kv_cache_dtype": "fp8_e4m3"}, {}, Level.PROBLEM, "KV cache type differs: fp8_e4m3 and auto"),
            ({"disaggregation_transfer_backend": "mooncake"}, {}, Level.OK, "may exchange KV"),
            ({}, {"disaggregation_transfer_backend": "nixl"}, Level.PROBLEM, "transfer differs: mooncake and nixl"),
            ({"version": "0.5.22"}, {}, Level.NOTE, "SGLang differs: 0.5.22 and 0.5.23"),
            ({"model_path": "/other/place/tiny/"}, {}, Level.OK, "may exchange KV"),
            ({"model_path": "/models/other"}, {}, Level.NOTE, "model differs: other and tiny"),
            ({"dcp_size": 4}, {}, Level.PROBLEM, "DCP 4 to DCP 2: SGLang sends from DCP 1, or between equal sizes"),
            ({"dcp_group_pages": 8}, {}, Level.NOTE, "pages are grouped for 8 decode ranks"),
            ({"dcp_group_pages": 2}, {}, Level.OK, "may exchange KV"),
        ],
    )
    def test_what_differs(
        self, prefill: Any, decode: Any, level: Level, text: str, sglang: Callable[..., Fake]
    ) -> None:
        capability = {key: prefill[key] for key in ("page_size", "dcp_size") if key in prefill}
        findings = pair.check(self.both(sglang, prefill, decode, **capability))
        assert any(finding.level is level and text in finding.got for finding in findings), findings

    @pytest.mark.parametrize(
        ("prefill", "decode", "shown"),
        [("b" * 16, "a" * 16, "bbbbbbbbbbbbbbbb"), (None, "a" * 16, "unknown"), ("b" * 99, "a" * 16, None)],
    )
    def test_plugins_that_differ(
        self, prefill: str | None, decode: str, shown: str | None, sglang: Callable[..., Fake]
    ) -> None:
        servers = self.both(sglang, {}, {"dcp_block": {**REPORT, "plugin_digest": decode}}, plugin_digest=prefill)
        found = [finding.got for finding in problems(pair.check(servers))]
        (row,) = (row for row in pair.rows(servers) if row.what == "plugin")
        if shown is None:  # no capability
            assert (row.cells, row.differs) == (("-", "a" * 16), False)
        else:
            assert found == [f"plugin differs: {shown} and {decode}"]
            assert (row.cells, row.differs) == ((shown, decode), True)

    @pytest.mark.parametrize("digest", [None, 5, {}, ""])
    def test_a_decode_server_that_does_not_tell_its_plugin(self, digest: object, sglang: Callable[..., Fake]) -> None:
        servers = self.both(sglang, {}, {"dcp_block": {**REPORT, "plugin_digest": digest}})
        (finding,) = problems(pair.check(servers))
        assert finding.got.startswith("plugin differs: aaaaaaaaaaaaaaaa and ")

    def test_a_server_without_blocks_has_no_plugin_to_compare(self, sglang: Callable[..., Fake]) -> None:
        servers = [looked_at(sglang(PREFILL, send(CAPABILITY))), looked_at(sglang(STOCK))]
        assert not problems(pair.check(servers))
        (row,) = (row for row in pair.rows(servers) if row.what == "plugin")
        assert (row.cells, row.differs) == (("a" * 16, "-"), False)

    def test_a_prefill_server_that_does_not_know_blocks(self, sglang: Callable[..., Fake]) -> None:
        prefill, decode = looked_at(sglang(PREFILL)), looked_at(sglang(DECODE))
        (finding,) = problems(pair.check([prefill, decode]))
        assert "does not say that it knows them" in finding.got
        (finding,) = pair.check([prefill, looked_at(sglang(STOCK))])
        assert (finding.level, finding.got) == (Level.OK, "may exchange KV, token by token")

    def test_no_pair(self, sglang: Callable[..., Fake]) -> None:
        decode = looked_at(sglang(DECODE))
        assert pair.check([decode]) == []
        (finding,) = pair.check([decode, decode])
        assert (finding.level, finding.got) == (
            Level.PROBLEM,
            "expected a prefill and a decode server, got decode, decode",
        )

    def test_a_server_that_could_not_be_read_is_left_out(self, sglang: Callable[..., Fake]) -> None:
        decode, unread = looked_at(sglang(DECODE)), Server("gone", ())
        assert pair.check([decode, unread]) == []
        assert all(len(row.cells) == 1 for row in pair.rows([decode, unread]))
