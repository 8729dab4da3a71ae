"""Lengths of requests: from a histogram on the command line, a trace file, or a preset."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_dcp_block.shown import shown

MAX_TOKENS = MAX_REQUESTS = 10**8  # of a prompt or an output; of requests of one length


class MixError(ValueError):
    """Lengths that cannot be read; says what was expected and what to do."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Requests of one length."""

    prompt_tokens: int
    output_tokens: int
    number: int = 1

    @property
    def total_tokens(self) -> int:
        """What a request holds at its end."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests that are in the server together, or one after the other in these shares."""

    name: str
    requests: tuple[Lengths, ...]

    @property
    def number(self) -> int:
        """Of requests."""
        return sum(request.number for request in self.requests)

    @property
    def total_tokens(self) -> int:
        """Of all requests, at their ends."""
        return sum(request.number * request.total_tokens for request in self.requests)

    @property
    def longest_prompt(self) -> int:
        """Tokens."""
        return max(request.prompt_tokens for request in self.requests)


# Column names of published traces and of OpenAI's usage records, as (prompt, output).
NAMES = (
    ("input_length", "output_length"),  # Mooncake
    ("ContextTokens", "GeneratedTokens"),  # Azure
    ("prompt_tokens", "completion_tokens"),  # OpenAI
    ("prompt_len", "output_len"),
    ("prompt_tokens", "output_tokens"),
)

PRESETS: dict[str, str] = {
    "chat": "200+300:30,600+300:30,1500+400:25,4000+500:10,12000+500:5",
    "agent": "4000+300:10,12000+300:25,30000+400:30,60000+400:25,120000+500:10",
    "long": "32768+1000:4,131072+1000:4,524288+1000:1,1000000+1000:1",
    "mixed": "500+300:40,2000+300:25,8000+500:15,32000+500:12,128000+1000:8",
}


def read(text: str) -> Mix:
    """A mix as a user names it: a preset, a file (``.jsonl``, ``.csv``), or a histogram.

    Raises:
        MixError: none of these, or something in it that is no length.

    >>> read("1000:2,4096+512:1").total_tokens
    6608
    """
    if text in PRESETS:
        return Mix(text, tuple(histogram(PRESETS[text])))
    if text.endswith((".jsonl", ".csv")):
        return trace(Path(text))
    if ":" in text:
        return Mix("given", tuple(histogram(text)))
    raise MixError(
        f"expected one of {', '.join(PRESETS)}, a trace file (.jsonl or .csv), or a histogram such as 1000:90,32000+500:10, "
        f"got {shown(text)}"
    )


def histogram(text: str) -> Iterator[Lengths]:
    """``PROMPT:NUMBER`` or ``PROMPT+OUTPUT:NUMBER``, with commas between.

    Raises:
        MixError: a part of another form.
    """
    for part in text.split(","):
        lengths, colon, number = part.strip().partition(":")
        prompt, plus, output = lengths.partition("+")
        found = [_digits(text) for text in (prompt, output if plus else "0", number)]
        numbers = [one for one in found if one is not None]
        if not colon or len(numbers) < len(found):
            raise MixError(
                f"histogram: expected PROMPT:NUMBER or PROMPT+OUTPUT:NUMBER in whole tokens, got {shown(part)}"
            )
        yield _checked(numbers[0], numbers[1], numbers[2], f"histogram: {shown(part)}")


def trace(file: Path) -> Mix:
    """A trace: JSON lines or CSV with a header, a request a line.

    Raises:
        MixError: it cannot be read, names no lengths, or holds something that is none.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # spreadsheets put a byte order mark first
    except (OSError, UnicodeDecodeError) as error:
        raise MixError(f"{file}: expected a readable trace, got: {error}") from error
    records = _json_lines(file, text) if file.suffix == ".jsonl" else _csv_lines(file, text)
    counts = Counter(_lengths(record, f"{file}: request {i}") for i, record in enumerate(records, 1))
    if not counts:
        raise MixError(f"{file}: expected a request or more, got none")
    return Mix(file.name, tuple(Lengths(*lengths, number) for lengths, number in sorted(counts.items())))


def _json_lines(file: Path, text: str) -> Iterator[Mapping[str, object]]:
    for i, line in enumerate(text.split("\n"), 1):  # splitlines() also splits inside of strings, at U+2028
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise MixError(f"{file}: line {i}: expected JSON, got: {error}") from error
        if not isinstance(record, dict):
            raise MixError(f"{file}: line {i}: expected an object, got {type(record).__name__}")
        yield record


def _csv_lines(file: Path, text: str) -> Iterator[Mapping[str, object]]:
    csv.field_size_limit(sys.maxsize)  # prompts may be long, and are in memory already
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        yield from reader
    except csv.Error as error:
        raise MixError(
            f"{file}: the record of line {reader.line_num + 1}: expected CSV, got: {error}. "
            "Close its quotes, and double those within; nothing may stand beside them."
        ) from error


def _lengths(record: Mapping[str, object], where: str) -> tuple[int, int]:
    for names in NAMES:
        if all(name in record for name in names):
            prompt, output = (_whole(record[name], f"{where}: {name}") for name in names)
            _checked(prompt, output, 1, where)
            return prompt, output
    named = [name for name in record if name is not None]  # of a header that is an empty line, csv says None
    raise MixError(f"{where}: expected {_either(NAMES)}, got {shown(named) if named else 'nothing'}")


def _whole(value: object, where: str) -> int:
    number = _digits(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise MixError(f"{where}: expected a whole number of tokens, got {shown(value)}")
    return number


def _digits(text: str) -> int | None:
    """The number that stands there, or None; one that is too long to be read is too large, too."""
    text = text.strip()
    if not (text.isascii() and text.isdecimal()):
        return None
    return int(text) if len(text) <= len(str(MAX_TOKENS)) else MAX_TOKENS + 1


def _checked(prompt: int, output: int, number: int, where: str) -> Lengths:
    if prompt < 1 or output < 0 or number < 1:
        raise MixError(
            f"{where}: expected a prompt of 1 token or more, an output of 0 or more, and 1 request or more, "
            f"got {shown(prompt)}, {shown(output)} and {number}"
        )
    if max(prompt, output) > MAX_TOKENS or number > MAX_REQUESTS:
        raise MixError(f"{where}: expected at most {MAX_TOKENS:,} tokens, and {MAX_REQUESTS:,} requests of one length")
    return Lengths(prompt, output, number)


def _either(pairs: Iterable[tuple[str, str]]) -> str:
    return ", or ".join(" and ".join(pair) for pair in pairs)
