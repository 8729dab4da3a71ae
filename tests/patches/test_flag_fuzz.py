"""Any value through the command line, the environment and the Engine keyword: a positive integer, or an error."""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_dcp_block import config
from sglang_dcp_block.config import BlockSizeError
from sglang_dcp_block.patches import flag, register

MESSAGES = [3000, pytest.param(100_000, marks=pytest.mark.slow)]
LARGEST = 2_147_483_647
# A digit of other scripts, superscripts, spaces of all kinds, signs, separators, what ends strings, what is no character.
ODD = "٣６²१௩〸½ⅷ \t\n\r\v\f\u00a0\u2003\u200b\ufeff+-–−_,.'eExX#%$\\\"\0\x1b\ud800😀"
LEAST = {config.KEYWORD: 1, config.GROUP_KEYWORD: 2}


class Unprintable:
    """What no error message can show, and what says that it is equal to anything."""

    def __repr__(self) -> str:
        raise ValueError("unprintable")

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


class Ranks(IntEnum):
    EIGHT = 8


OBJECTS: list[Any] = [
    0, -1, True, False, 8.0, float("nan"), float("inf"), -0.0, 1e300, 8j, b"8", bytearray(b"8"), [], [8], (8,), {8}, {8: 8},
    Decimal(8), Fraction(8), np.int64(8), np.array(8), np.array([8, 16]), np.array(["auto", "auto"]), torch.tensor(8),
    torch.tensor([8, 16]), range(8), int, object(), Unprintable(), Ranks.EIGHT, 10**5000, -(10**5000), LARGEST, LARGEST + 1,
    2**31, 2**63, 2**64, -(2**63), ..., NotImplemented, Ellipsis, lambda: 8,
]  # fmt: skip


def text(rng: random.Random) -> str:
    match rng.randrange(7):
        case 0:
            return str(rng.choice([0, 1, 2, 8, 64, LARGEST, LARGEST + 1, rng.getrandbits(rng.randint(1, 80))]))
        case 1:
            return rng.choice(["0", "9", "8"]) * rng.choice([1, 10, 400, 4300, 4301, 5000]) + rng.choice(["", "8"])
        case 2:
            return "".join(rng.choices(ODD + "0123456789", k=rng.randint(0, 6)))
        case 3:
            return rng.choice(
                ["auto", "AUTO", "Auto", "auto ", "aut", "none", "true", "nan", "inf", "1e3", "0x8", "8.0", ""]
            )
        case 4:
            return "".join(chr(rng.randrange(0x11000)) for _ in range(rng.randint(1, 4)))
    number = list(str(rng.randint(1, 4096)))
    for _ in range(rng.randint(0, 2)):
        number.insert(rng.randint(0, len(number)), rng.choice(ODD))
    return "".join(number)


def value(rng: random.Random) -> Any:
    """What a program may pass as a keyword."""
    return rng.choice([text(rng), rng.choice(OBJECTS), rng.randint(-3, 70)])


def wanted(given: Any, least: int) -> int | None:
    """The number that ``given`` is, or None; looked at character by character."""
    if isinstance(given, str):
        if not given or any(character not in "0123456789" for character in given):
            return None
        number = 0
        for character in given:
            number = min(10 * number + "0123456789".index(character), LARGEST + 1)
    elif isinstance(given, int) and given is not True and given is not False:
        number = given
    else:
        return None
    return int(number) if least <= number <= LARGEST else None


@pytest.fixture
def ways(monkeypatch):
    """By name: a way in, from a value to what SGLang's record gets, (block size or None, ranks or None)."""
    from sglang.srt.entrypoints.engine import Engine

    monkeypatch.setattr(register, "verify", lambda points: None)  # the hooks themselves are tested elsewhere
    monkeypatch.setattr(Engine, "server_args_class", staticmethod(lambda **others: SimpleNamespace(**others)))
    flag.install_engine_keyword()
    parser = argparse.ArgumentParser(exit_on_error=True)
    flag.add_flag(None, parser)

    def command_line(name: str, given: str) -> Any:
        option = {config.KEYWORD: config.FLAG, config.GROUP_KEYWORD: config.GROUP_FLAG}[name]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                args = parser.parse_args([f"{option}={given}"])
        except SystemExit as error:
            raise BlockSizeError(said.getvalue()) from error
        record = SimpleNamespace()
        flag.carry_flag(record, object, args)
        return record

    def environment(name: str, given: str) -> Any:
        monkeypatch.setattr(flag.os, "environ", {config.ENVIRONMENT: given})
        request = flag.request_of(SimpleNamespace())
        return SimpleNamespace(**({} if request is None else {"_dcp_block_request": (request.value, request.source)}))

    def keyword(name: str, given: Any) -> Any:
        return Engine.server_args_class(**{name: given})

    return {"command line": command_line, "environment": environment, "keyword": keyword}


def outcome(way: Any, name: str, given: Any) -> Any:
    record = way(name, given)
    attribute = "_dcp_block_request" if name == config.KEYWORD else "_dcp_group_request"
    return getattr(record, attribute, (None,))[0]


@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.timeout(1800)
def test_only_exact_positive_integers_get_in(ways, messages):
    rng, seen = random.Random(7), {True: 0, False: 0}
    for _ in range(messages):
        way = rng.choice(list(ways))
        name = config.KEYWORD if way == "environment" else rng.choice(list(LEAST))
        given = value(rng) if way == "keyword" else text(rng)
        if name == config.KEYWORD and isinstance(given, str) and given == "auto":
            want: Any = "auto"
        else:
            want = wanted(given, LEAST[name])
        if way == "environment" and given == "":  # a variable that is set to nothing
            assert outcome(ways[way], name, given) is None
            continue
        seen[want is not None] += 1
        try:
            got = outcome(ways[way], name, given)
        except BlockSizeError as error:
            got, said = None, str(error)
        if want is None:
            assert got is None, f"{way} {name}: a {type(given)} was taken"
            assert re.search("expected .*, got ", said, re.DOTALL), said
            assert len(said) < 1000, "nobody reads so much"
        else:
            assert (type(got), got) == (type(want), want), f"{way} {name}: {given!r}"
    assert min(seen.values()) > messages / 20, seen
