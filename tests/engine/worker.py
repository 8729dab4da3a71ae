"""Owns one SGLang Engine; carries out JSON commands, one a line, and answers each with one JSON line.

Run by :class:`session.EngineSession` in a process of its own, because the environment must be set before SGLang is
imported.  Answers go to the file descriptor given as the second argument, so that logs cannot mix with them.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback


def main() -> None:
    kwargs = json.loads(sys.argv[1])
    answers = os.fdopen(int(sys.argv[2]), "w")

    def answer(**fields) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    began = time.perf_counter()
    try:
        from sglang.srt.entrypoints.engine import Engine

        engine = Engine(**kwargs)
    except BaseException as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(3)
    answer(ready=True, seconds=round(time.perf_counter() - began, 1))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer(result=carry_out(engine, command))
        except Exception as error:
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {error}")
    engine.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Python's own end, which collects all that SGLang has imported, takes longer than the session waits


def carry_out(engine, command: dict):
    name = command.pop("do")
    if name == "generate":
        return [trimmed(x) for x in engine.generate(return_logprob=True, logprob_start_len=-1, **command)]
    if name == "flush":
        result = engine.flush_cache()
        return bool(getattr(result, "success", True))
    if name == "score":
        once = {"sampling_params": {"temperature": 0, "max_new_tokens": 1}, "return_logprob": True}
        return [scores(x) for x in engine.generate(logprob_start_len=0, top_logprobs_num=1, **once, **command)]
    if name == "info":
        info = engine.get_server_info()
        return {key: info.get(key) for key in command["keys"]}
    raise ValueError(f"unknown command {name!r}")


def scores(output: dict) -> list:
    meta = output["meta_info"]
    pairs = zip(meta["input_token_logprobs"], meta["input_top_logprobs"], strict=True)
    return [[own[0], best[0][0]] for own, best in list(pairs)[1:]]


def trimmed(output: dict) -> dict:
    meta = output["meta_info"]
    sources = meta.get("cached_tokens_details") or {}
    return {
        "ids": output["output_ids"],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
        "cached": meta.get("cached_tokens"),
        "from_host": sources.get("host", 0),
        "from_storage": sources.get("storage", 0),
        "retracted": meta.get("num_retractions"),
        "finish": meta.get("finish_reason"),
    }


if __name__ == "__main__":
    main()
