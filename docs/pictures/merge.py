"""Why partial outputs are merged by log-sum-exp and not averaged: one query, two ranks, in numbers."""

from __future__ import annotations

import math

from svg import RANK_COLOURS, Drawing

SCORES = ((2.0, 2.0), (0.0, 0.0, 0.0))  # of the query with each rank's tokens
VALUES = ((1.0, 3.0), (10.0, 10.0, 10.0))  # one number a token


def softmax_part(scores: tuple[float, ...], values: tuple[float, ...]) -> tuple[float, float]:
    """A rank's output and its log-sum-exp."""
    weights = [math.exp(score) for score in scores]
    total = sum(weights)
    return sum(w * v for w, v in zip(weights, values, strict=True)) / total, math.log(total)


def numbers() -> dict[str, float]:
    """What the picture shows."""
    (first, first_lse), (second, second_lse) = (softmax_part(*pair) for pair in zip(SCORES, VALUES, strict=True))
    exact, lse = softmax_part(SCORES[0] + SCORES[1], VALUES[0] + VALUES[1])
    shares = math.exp(first_lse - lse), math.exp(second_lse - lse)
    return {
        "first": first,
        "second": second,
        "first lse": first_lse,
        "second lse": second_lse,
        "first share": shares[0],
        "second share": shares[1],
        "average": (first + second) / 2,
        "merged": shares[0] * first + shares[1] * second,
        "exact": exact,
    }


def picture() -> str:
    """The numbers, rank by rank, and what comes of averaging and of merging."""
    got = numbers()
    drawing = Drawing(760, 250, "Partial outputs cannot be averaged")
    drawing.text(
        16, 26, "One query, five tokens on two ranks: each rank's softmax knows its own tokens only", bold=True
    )
    for rank, name in enumerate(("first", "second")):
        top = 48 + rank * 50
        drawing.text(16, top + 20, f"rank {rank}")
        for i, (score, value) in enumerate(zip(SCORES[rank], VALUES[rank], strict=True)):
            drawing.box(80 + i * 100, top, 96, 32, f"s={score:g}  v={value:g}", RANK_COLOURS[rank])
        lse, share = got[f"{name} lse"], got[f"{name} share"]
        drawing.text(400, top + 20, f"O = {got[name]:.2f}   L = {lse:.2f}   weight exp(L - L_all) = {share:.2f}")
    lines = (
        (
            f"average of the outputs:   ({got['first']:.2f} + {got['second']:.2f}) / 2 = {got['average']:.2f}   wrong",
            "#b00000",
        ),
        (
            f"merged by log-sum-exp:   {got['first share']:.2f} * {got['first']:.2f} + {got['second share']:.2f} * "
            f"{got['second']:.2f} = {got['merged']:.2f}",
            "#006000",
        ),
        (f"softmax over all five:   {got['exact']:.2f}", "#222222"),
    )
    for i, (line, ink) in enumerate(lines):
        drawing.text(80, 175 + i * 26, line, ink=ink)
    return drawing.as_text()
