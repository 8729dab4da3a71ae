"""Completions over HTTP: text through the OpenAI-compatible API, token ids through SGLang's own."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

Prompt = str | tuple[int, ...]  # text, or token ids


class RequestFailed(Exception):
    """A request was refused, or not answered in time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy completion."""

    text: str  # empty for a model without tokenizer
    tokens: tuple[str, ...] | tuple[int, ...]
    logprobs: tuple[float, ...]  # of the tokens
    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt, found in the server's prefix cache; not told by the OpenAI-compatible API

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is in the cache at the end: the last one was sampled, but never fed back."""
        return self.prompt_tokens + len(self.tokens) - 1


def complete_all(url: str, prompts: Sequence[Prompt], new_tokens: int, timeout: float) -> list[Answer]:
    """Send all prompts at once, each in a request of its own; answers in the order of the prompts.

    Raises:
        RequestFailed: for the first request that failed.
    """
    pool = ThreadPoolExecutor(len(prompts))
    try:
        return list(pool.map(lambda prompt: complete(url, prompt, new_tokens, timeout), prompts))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # whoever interrupts us ends the server, and so the requests


def complete(url: str, prompt: Prompt, new_tokens: int, timeout: float) -> Answer:
    """One prompt's greedy completion of exactly ``new_tokens`` tokens, with log-probabilities.

    Raises:
        RequestFailed: the server answered with an error, or not within ``timeout`` seconds.
    """
    if isinstance(prompt, str):
        fields = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        return from_openai(fetch(f"{url}/v1/completions", {"model": "default", **fields}, timeout))
    return generate(url, prompt, new_tokens, timeout)


def generate(url: str, prompt: Sequence[int], new_tokens: int, timeout: float, **fields: Any) -> Answer:
    """As :func:`complete`, for token ids, with further ``fields`` in the request.

    Raises:
        RequestFailed: as :func:`complete`.
    """
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, **fields}
    return from_generate(fetch(f"{url}/generate", body, timeout))


def from_openai(reply: dict[str, Any]) -> Answer:
    """Read a reply of ``/v1/completions``."""
    (choice,) = reply["choices"]
    logprobs = choice["logprobs"]
    return Answer(
        choice["text"],
        tuple(logprobs["tokens"]),
        tuple(logprobs["token_logprobs"]),
        reply["usage"]["prompt_tokens"],
    )


def from_generate(reply: dict[str, Any]) -> Answer:
    """Read a reply of ``/generate``.

    Raises:
        RequestFailed: the server gave the request up.
    """
    meta = reply["meta_info"]
    finish = meta.get("finish_reason") or {}
    if finish.get("type") == "abort":
        raise RequestFailed(f"aborted: {finish.get('message')}")
    logprobs = tuple(entry[0] for entry in meta["output_token_logprobs"])
    return Answer("", tuple(reply["output_ids"]), logprobs, meta["prompt_tokens"], meta.get("cached_tokens") or 0)


def fetch(url: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
    """POST ``body`` as JSON, or GET without one; returns the JSON reply (empty for an empty reply).

    Raises:
        RequestFailed: saying what was asked and what came back.
    """
    result: dict[str, Any] = json.loads(exchange(url, body, timeout) or b"{}")
    return result


def exchange(url: str, body: dict[str, Any] | None, timeout: float) -> bytes:
    """As :func:`fetch`, for a reply of any kind."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    # Never through a proxy: the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as reply:
            content: bytes = reply.read()
            return content
    except urllib.error.HTTPError as error:
        raise RequestFailed(f"{url}: status {error.code}: {error.read().decode(errors='replace')[:500]}") from error
    except (OSError, http.client.HTTPException) as error:
        what = f"no answer in {timeout:.0f} s" if isinstance(error, TimeoutError) else str(error)
        raise RequestFailed(f"{url}: {what}") from error
