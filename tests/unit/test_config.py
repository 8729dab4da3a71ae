"""The block size as a user asks for it: what is taken, what is refused, and what it resolves to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sglang_dcp_block import config
from sglang_dcp_block.config import BlockSizeError, Request


def refused(message: str) -> Any:
    """Expects a BlockSizeError with exactly this text."""
    return pytest.raises(BlockSizeError, match=f"^{re.escape(message)}$")


class TestParse:
    @pytest.mark.parametrize(
        ("typed", "value"),
        [
            (1, 1),
            (64, 64),
            ("1", 1),
            ("64", 64),
            ("064", 64),
            ("auto", "auto"),
            (2**31 - 1, 2**31 - 1),
            ("0" * 9999 + "8", 8),
        ],
    )
    def test_positive_numbers_and_auto(self, typed: object, value: object) -> None:
        assert config.parse(typed, "here") == Request(value, "here")
        assert type(config.parse(typed, "here").value) is type(value)

    @pytest.mark.parametrize(
        "typed",
        [0, -1, -64, True, False, 64.0, 0.5, None, b"64", [64], "", " ", "0", "-8", "+8", " 64", "64 ", "1e3", "64.0",
         "0x40", "1_000", "６４", "٦٤", "²", "AUTO", "Auto", "auto ", "none", "true"],
    )  # fmt: skip
    def test_anything_else_is_refused_and_shown(self, typed: object) -> None:
        with refused(f"--flag: expected a positive number of tokens or 'auto', got {typed!r}"):
            config.parse(typed, "--flag")

    @pytest.mark.parametrize(
        ("typed", "shown"),
        [
            (2**31, "2147483648"),
            ("2147483648", "'2147483648'"),
            ("9" * 5000, f"'{'9' * 79} (... of 5002 characters)"),
            (10**5000, "of type int, which cannot be shown"),
        ],
        ids=["int", "text", "long text", "long int"],
    )
    def test_more_than_can_travel_is_refused_and_shown_as_far_as_it_can_be(self, typed: object, shown: str) -> None:
        with refused(f"--flag: expected at most 2147483647 tokens, got {shown}"):
            config.parse(typed, "--flag")
        with refused(f"--flag: expected the decode servers' --dcp-size, 2147483647 at most, got {shown}"):
            config.parse_group_pages(typed, "--flag")

    def test_one_asks_for_what_sglang_does_anyway(self) -> None:
        assert not config.parse("1", "here").wants_blocks
        assert config.parse("2", "here").wants_blocks
        assert config.parse("auto", "here").wants_blocks


class TestEnvironment:
    @pytest.mark.parametrize("environ", [{}, {config.ENVIRONMENT: ""}, {"DCP_BLOCK_SIZE": "64"}])
    def test_unset_or_empty_asks_for_nothing(self, environ: dict[str, str]) -> None:
        assert config.from_environment(environ) is None

    @pytest.mark.parametrize(("text", "value"), [("16", 16), ("1", 1), ("auto", "auto")])
    def test_set(self, text: str, value: object) -> None:
        assert config.from_environment({config.ENVIRONMENT: text}) == Request(value, config.ENVIRONMENT)

    def test_nonsense_is_refused_by_the_variables_name(self) -> None:
        with refused("SGLANG_DCP_BLOCK_SIZE: expected a positive number of tokens or 'auto', got 'big'"):
            config.from_environment({config.ENVIRONMENT: "big"})


class TestPageSize:
    @pytest.mark.parametrize("page_size", [1, 8, 64, 4096])
    @pytest.mark.parametrize("value", [1, 16, "auto"])
    def test_the_users_own_is_kept(self, value: Any, page_size: int) -> None:
        assert config.page_size_for(Request(value, "flag"), page_size) == page_size

    @pytest.mark.parametrize(("value", "page_size"), [(1, None), (2, 2), (16, 16), (100, 100), ("auto", 64)])
    def test_unset_follows_the_block_size(self, value: Any, page_size: int | None) -> None:
        assert config.page_size_for(Request(value, "flag"), None) == page_size


class TestBlockSize:
    @pytest.mark.parametrize("page_size", [1, 7, 64])
    @pytest.mark.parametrize("value", [1, 3, 64])
    def test_a_number_is_itself(self, value: int, page_size: int) -> None:
        assert config.block_size_for(Request(value, "flag"), page_size) == value

    @pytest.mark.parametrize("page_size", [2, 7, 64])
    def test_auto_is_the_page_size(self, page_size: int) -> None:
        assert config.block_size_for(Request("auto", "flag"), page_size) == page_size

    def test_auto_with_pages_of_one_token_is_refused(self) -> None:
        with refused(
            "--flag auto: expected a page size above 1, got --page-size 1. Leave --page-size unset (it becomes 64), "
            "or pass the page size you want."
        ):
            config.block_size_for(Request("auto", "--flag"), 1)


def test_the_help_text_survives_argparse() -> None:
    """argparse formats help with %, so a bare percent sign would break ``--help`` of the whole server."""
    shown = config.HELP % {}
    assert "t // N % dcp_size" in shown


class TestGroupPages:
    @pytest.mark.parametrize(("typed", "value"), [(2, 2), ("8", 8), ("016", 16)])
    def test_numbers_of_ranks(self, typed: object, value: int) -> None:
        assert config.parse_group_pages(typed, "here") == value

    @pytest.mark.parametrize("typed", [0, 1, "1", -2, True, 8.0, None, "auto", "8:64", "+8", "²", ""])
    def test_anything_else_is_refused_and_shown(self, typed: object) -> None:
        with refused(f"--flag: expected the decode servers' --dcp-size, 2 or more, got {typed!r}"):
            config.parse_group_pages(typed, "--flag")
