"""``sglang-dcp-block doctor --url``: its options, its exit status, what it prints."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
from doctor_servers import CAPABILITY, COMMON, DECODE, PREFILL, Fake, send
from rich.console import Console

from sglang_dcp_block import cli
from sglang_dcp_block.doctor import pair, report


class TestCommand:
    def test_a_pair_by_the_command_line(self, sglang: Callable[..., Fake], capsys: pytest.CaptureFixture[str]) -> None:
        prefill, decode = sglang(PREFILL, send(CAPABILITY)), sglang(DECODE)
        urls = ["--url", prefill.url.geturl(), "--url", decode.url.geturl()]
        assert cli.main(["doctor", *urls, "--expect-block-size", "16"]) == 0
        said = capsys.readouterr().out
        assert "side by side" in said
        assert "No problem" in said
        assert "a secret" not in said
        assert cli.main(["doctor", *urls, "--expect-block-size", "64", "--json"]) == 1
        data = json.loads(said := capsys.readouterr().out)
        assert data["status"] == 1
        assert [f["got"] for f in data["findings"] if f["level"] == "problem"] == ["expected 64, got 16"]
        assert data["side_by_side"]["servers"] == [prefill.url.geturl(), decode.url.geturl()]
        assert "a secret" not in said

    def test_no_server_gives_orders_to_the_terminal(
        self, sglang: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
    ) -> None:
        odd = {**COMMON, "disaggregation_mode": "null", "dcp_size": 1, "page_size": 16}
        urls = [
            sglang({**odd, "version": "0.5.23\x1b[2J", "model_path": "m\x1b]0;t\x07"}).url.geturl(),
            sglang({**odd, "version": "[bold]x[/bold]"}).url.geturl(),
        ]
        assert cli.main(["doctor", "--url", urls[0], "--url", urls[1]]) == 1
        said = capsys.readouterr().out
        assert "\x1b" not in said
        assert "\x07" not in said
        assert "0.5.23\\x1b[2J; the plugin here" in said
        assert "[bold]x[/bold]; the plugin here" in said

    def test_an_address_is_no_markup(self) -> None:
        console = Console(record=True, width=120, file=io.StringIO())
        report.show(
            console, [], ["http://[fe80::1]:30000", "http://b:1"], [pair.Row("mode", ("prefill", "decode"), False)]
        )
        assert "http://[fe80::1]:30000" in console.export_text()

    def test_what_differs_is_marked(self, sglang: Callable[..., Fake], capsys: pytest.CaptureFixture[str]) -> None:
        prefill = sglang({**PREFILL, "page_size": 64}, send({**CAPABILITY, "page_size": 64}))
        assert cli.main(["doctor", "--url", prefill.url.geturl(), "--url", sglang(DECODE).url.geturl()]) == 1
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(" page size"))
        assert line.split() == ["page", "size", "64", "16", "DIFFERS"]

    def test_another_plugin_is_marked(self, sglang: Callable[..., Fake], capsys: pytest.CaptureFixture[str]) -> None:
        prefill = sglang(PREFILL, send({**CAPABILITY, "plugin_digest": "b" * 16}))
        urls = ["--url", prefill.url.geturl(), "--url", sglang(DECODE).url.geturl()]
        assert cli.main(["doctor", *urls]) == 1
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(" plugin"))
        assert line.split() == ["plugin", "b" * 16, "a" * 16, "DIFFERS"]

    def test_blocks_of_ranks_that_say_otherwise_are_not_the_expected_ones(
        self, sglang: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = sglang({**DECODE, "dcp_block": {**DECODE["dcp_block"], "block_size": 8}}).url.geturl()
        assert cli.main(["doctor", "--url", url, "--expect-block-size", "16", "--json"]) == 1
        (finding,) = (
            one for one in json.loads(capsys.readouterr().out)["findings"] if one["what"] == "expected block size"
        )
        assert (finding["level"], finding["got"]) == ("problem", "not judged: its layout is unclear")

    def test_blocks_that_nobody_could_be_asked_for_are_a_problem(
        self, sglang: Callable[..., Fake], fake: Callable[..., Fake], capsys: pytest.CaptureFixture[str]
    ) -> None:
        prefill, gone = sglang(PREFILL, send(CAPABILITY)).url.geturl(), fake({}).url.geturl()
        for urls, got, advice in (
            ([prefill], "prefill", "Pass the --url of a decode server, too"),
            ([prefill, gone], "prefill, one that was not read", "Mend what keeps it from being read"),
        ):
            argv = [word for url in urls for word in ("--url", url)]
            assert cli.main(["doctor", *argv, "--expect-block-size", "16", "--json"]) == 1
            finding = json.loads(capsys.readouterr().out)["findings"][-1]
            assert finding["level"] == "problem"
            assert finding["got"] == f"not judged: expected a server that decodes, got {got}"
            assert finding["advice"].startswith(advice)
        assert cli.main(["doctor", "--url", prefill]) == 0

    @pytest.mark.parametrize(
        "argv",
        [
            ["--url", "http://h:1", "--", "--tp", "8"],
            ["--expect-block-size", "8"],
        ],
    )
    def test_options_that_do_not_go_together(self, argv: list[str]) -> None:
        assert cli.main(["doctor", *argv]) == 2

    def test_a_key_that_no_header_takes_is_not_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        for key in ("sec\nret", "sec→ret"):
            with pytest.raises(SystemExit) as end:
                cli.main(["doctor", "--url", "http://h:1", "--api-key", key])
            said = capsys.readouterr().err
            assert end.value.code == 2
            assert "--api-key: expected printable ASCII characters" in said
            assert "sec" not in said

    @pytest.mark.parametrize(
        "argv", [["--url", "ftp://h"], ["--timeout", "0"], ["--url", "h", "--expect-block-size", "x"]]
    )
    def test_values_that_are_none(self, argv: list[str]) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main(["doctor", *argv])
        assert end.value.code == 2
