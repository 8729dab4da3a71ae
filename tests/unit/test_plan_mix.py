"""Lengths of requests: histograms, traces and presets, and what is said of anything else."""

from __future__ import annotations

import json

import pytest

from sglang_dcp_block.plan.mix import PRESETS, Lengths, MixError, read


def test_a_histogram():
    mix = read("1000:90, 32000+500:10")
    assert mix.requests == (Lengths(1000, 0, 90), Lengths(32000, 500, 10))
    assert (mix.number, mix.total_tokens, mix.longest_prompt) == (100, 90_000 + 325_000, 32000)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    assert read(name).number > 0
    assert read(name).name == name


@pytest.mark.parametrize(
    ("prompt", "output"),
    [("input_length", "output_length"), ("ContextTokens", "GeneratedTokens"), ("prompt_tokens", "completion_tokens")],
)
def test_published_traces(tmp_path, prompt, output):
    """The same requests as JSON lines and as CSV, by the names of Mooncake's, Azure's and OpenAI's records."""
    requests = [(6758, 500), (12, 3), (6758, 500)]
    lines = [json.dumps({"timestamp": 0, prompt: a, output: b}) for a, b in requests]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "trace.csv").write_text(f"TIMESTAMP,{prompt},{output}\n" + "\n".join(f"0,{a},{b}" for a, b in requests))
    for name in ("trace.jsonl", "trace.csv"):
        assert read(str(tmp_path / name)).requests == (Lengths(12, 3, 1), Lengths(6758, 500, 2))


def test_a_trace_from_a_spreadsheet(tmp_path):
    """With a byte order mark, and a space after each comma."""
    file = tmp_path / "t.csv"
    file.write_text("\ufeffContextTokens, GeneratedTokens\n100, 20\n", encoding="utf-8")
    assert read(str(file)).requests == (Lengths(100, 20, 1),)


@pytest.mark.parametrize("letter", ["\u2028", "\u0085"])
def test_only_a_line_end_ends_a_line(tmp_path, letter):
    """Unicode has more of them, and prompts may hold those as they are."""
    record = f'{{"prompt": "a{letter}b", "prompt_len": 7, "output_len": 1}}'
    (tmp_path / "t.jsonl").write_bytes(f"{record}\r\n{record}\n".encode())
    (tmp_path / "t.csv").write_bytes(f"prompt,prompt_len,output_len\r\na{letter}b,7,1\r\na{letter}b,7,1".encode())
    for name in ("t.jsonl", "t.csv"):
        assert read(str(tmp_path / name)).requests == (Lengths(7, 1, 2),)


def test_a_csv_with_prompts(tmp_path):
    """In quotes, with lines, and longer than Python's csv reads by itself."""
    prompt = "a line\n" * 30_000
    (tmp_path / "t.csv").write_text(f'prompt,prompt_len,output_len\n"{prompt}",7,1\n')
    assert read(str(tmp_path / "t.csv")).requests == (Lengths(7, 1),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chatty", r"expected one of chat, agent, long, mixed, a trace file .* got 'chatty'"),
        ("1000:x", r"expected PROMPT:NUMBER or PROMPT\+OUTPUT:NUMBER in whole tokens, got '1000:x'"),
        ("1000:1,5", r"expected PROMPT:NUMBER .* got '5'"),
        ("-1:1", r"expected PROMPT:NUMBER .* got '-1:1'"),
        ("0:1", r"expected a prompt of 1 token or more, .* got 0, 0 and 1"),
        ("5:0", r"and 1 request or more, got 5, 0 and 0"),
        ("1000+:5", r"expected PROMPT:NUMBER .* got '1000\+:5'"),
        ("²:1", r"in whole tokens, got '²:1'"),
        ("١٢:1", r"in whole tokens, got '١٢:1'"),
        ("100000001:1", r"expected at most 100,000,000 tokens, and 100,000,000 requests of one length"),
        ("1+100000001:1", r"expected at most 100,000,000 tokens"),
        ("1:100000001", r"expected at most 100,000,000 tokens"),
        ("9" * 5000 + ":1", r"histogram: '9{79} .* characters\): expected at most 100,000,000 tokens"),
        ("a" * 5000, r"got 'a{79} \(... of 5002 characters\)$"),
        ("missing.csv", r"missing.csv: expected a readable trace, got: .*No such file"),
    ],
)
def test_what_is_no_mix(text, message):
    with pytest.raises(MixError, match=message):
        read(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", "", "expected a request or more, got none"),
        ("t.jsonl", "{", "line 1: expected JSON, got"),
        ("t.jsonl", "[1]", "line 1: expected an object, got list"),
        ("t.jsonl", "[" * 100_000, "line 1: expected JSON, got"),
        ("t.jsonl", '{"prompt_len": ' + "9" * 5000 + ', "output_len": 1}', "line 1: expected JSON, got"),
        (
            "t.jsonl",
            '{"prompt_len": 1' + "0" * 18 + ', "output_len": 1}',
            "request 1: expected at most 100,000,000 tokens",
        ),
        ("t.csv", "prompt_len,output_len\n" + "9" * 5000 + ",1\n", "request 1: expected at most 100,000,000 tokens"),
        ("t.jsonl", '{"a": 1}', "request 1: expected input_length and output_length, or .*, got \\['a'\\]$"),
        ("t.jsonl", "{}", "request 1: expected .*, got nothing$"),
        ("t.jsonl", json.dumps({f"\x1b[31m{i}": 1 for i in range(200)}), r"got \['\\x1b[^\x1b]{1,110} characters\)$"),
        ("t.jsonl", '{"prompt_len": 1.5, "output_len": 1}', "prompt_len: expected a whole number of tokens, got 1.5"),
        ("t.jsonl", '{"prompt_len": 0, "output_len": 1}', "request 1: expected a prompt of 1 token or more"),
        (
            "t.csv",
            'prompt_len,output_len\n5,1\n"6,1\n7,1\n',
            "record of line 3: expected CSV, got: unexpected end.* Close",
        ),
        (
            "t.csv",
            'x,prompt_len,output_len\n"a \\"b\\" c",5,1\n',
            "record of line 2: expected CSV, .* double those within",
        ),
        ("t.csv", "\nprompt_len,output_len\n5,1\n", "request 1: expected .*, got nothing$"),
        ("t.csv", "prompt_len,output_len\n5,-1\n", "output_len: expected a whole number of tokens, got '-1'"),
    ],
)
def test_what_is_no_trace(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(MixError, match=message):
        read(str(tmp_path / name))
