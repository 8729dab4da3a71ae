"""Each error that an operator can meet is in the docs, and each error that the docs quote is in the code."""

from __future__ import annotations

import functools
import re

import pytest
from error_texts import all_quotes, exists, met_by_operators, quoted, quotes, texts

# Of SGLang and Python, not ours; or words in a cell that are no error.
FOREIGN = (
    "error: unrecognized arguments: ",
    "unexpected keyword argument ",
    "operator torchvision::nms does not exist",
    "Failed due to an unknown reason from another rank",
)


@functools.cache
def pieces() -> list[str]:
    """What the docs quote, and each text that one passed on."""
    ends = (quote[end:] for quote in all_quotes() for end in [0, *(m.end() for m in re.finditer(": ", quote))])
    return [piece for piece in ends if len(piece) > 16]


@pytest.fixture(scope="module")
def of_the_code() -> list[str]:
    return texts()


@pytest.mark.parametrize("quote", [q for q in quoted() if not q.startswith(FOREIGN)])
def test_a_quoted_error_exists(quote: str, of_the_code: list[str]) -> None:
    assert exists(quote, of_the_code)


@pytest.mark.parametrize("text", met_by_operators(), ids=lambda text: text.replace("\0", "_")[:60])
def test_an_error_is_documented(text: str) -> None:
    assert any(quotes(piece, text) for piece in pieces()), text


def test_the_comparison() -> None:
    text = "\0: expected a positive number of tokens or 'auto', got \0"
    assert quotes("expected a positive number of tokens or 'auto', got ...", text)
    assert not quotes("expected a positive number of pages or 'auto', got ...", text)
    assert quotes("is unset, taking 64 tokens", "%s: --page-size is unset, taking %d tokens.")
    assert not quotes("expected 8, got", "expected \0 and, got")
