"""SGLang's own prefill scheduler in this process: real loop, queues, pools and cache, and a model that computes nothing.

Requests name SGLang's own host for transfers that send nothing, so each is done in the pass of the loop that prefills it.
"""

from __future__ import annotations

from benchmarks import environment  # noqa: F401  # before SGLang

import socket  # isort: skip
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def prefill_scheduler(page_size: int, pool_pages: int, chunk_tokens: int) -> Iterator[Any]:
    """A ``Scheduler`` of a server with ``--disaggregation-mode prefill``, TP1, on the CPU. One a process."""
    from sglang.srt.managers.disagg_service import start_disagg_service
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sglang_dcp_block.cpu.checkpoints import write_tiny

    load_plugins()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny("mla", Path(folder) / "model", num_hidden_layers=1, max_position_embeddings=1 << 16)
        server_args = ServerArgs(
            model_path=str(model), device="cpu", dtype="bfloat16", attention_backend="flashinfer", page_size=page_size,
            chunked_prefill_size=chunk_tokens, max_prefill_tokens=chunk_tokens, context_length=2 * chunk_tokens,
            max_total_tokens=pool_pages * page_size, max_running_requests=8, mem_fraction_static=0.3,
            skip_tokenizer_init=True, disable_cuda_graph=True, disable_overlap_schedule=True, grammar_backend="none",
            sampling_backend="pytorch", log_level="error", host="127.0.0.1", port=_free_port(),
            disaggregation_mode="prefill", disaggregation_transfer_backend="mooncake_tcp",
            disaggregation_bootstrap_port=_free_port(),
        )  # fmt: skip
        server_args.resolve_once()
        server_args.check_server_args()
        publish(server_args, role="tokenizer")
        ports = PortArgs.init_new(server_args)
        bootstrap = start_disagg_service()
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        configure_scheduler_process(server_args, 0)
        scheduler = Scheduler(server_args, ports)
        scheduler.model_worker.forward_batch_generation = _answer_at_once
        yield scheduler
        del bootstrap


def run(
    scheduler: Any,
    prompts: Iterable[array[int]],
    before: Callable[[int], object] = lambda number: None,
    clock: Callable[[], float] = time.thread_time,
) -> list[float]:
    """Let the scheduler's loop prefill a prompt a pass, until there are no more.

    Args:
        prompts: each at most a chunk.
        before: called before each pass, with its number.
        clock: of this thread's CPU time, so that other work of the machine does not count.

    Returns:
        Seconds of each pass: of all that the loop does for a chunk, from behind the arrival of the request to the end of
        the pass. A forward pass of the model is not in it, a transfer neither.
    """
    waiting = enumerate(prompts)
    begins: list[float] = []
    ends: list[float] = []

    def ingest(*_: Any, **__: Any) -> list[Any]:
        if begins:
            ends.append(clock())
        number, prompt = next(waiting, (-1, array("q")))
        if number < 0:
            scheduler.gracefully_exit = True
            return []
        scheduler.process_input_requests([_request(number, prompt)])
        for request in scheduler.disagg_prefill_bootstrap_queue.queue:
            request.skip_radix_cache_insert = False  # as SGLang has it for its own host, that of warm-up requests
        before(number)
        begins.append(clock())
        return []

    scheduler.gracefully_exit, scheduler.ingest_requests = False, ingest
    scheduler.event_loop_normal_disagg_prefill()
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


def _request(number: int, prompt: array[int]) -> Any:
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=1, temperature=0)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid=str(number), input_text=None, input_ids=prompt, input_embeds=None, mm_inputs=None, token_type_ids=None,
        sampling_params=sampling, return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
        token_ids_logprob=None, stream=False, bootstrap_host=FAKE_BOOTSTRAP_HOST, bootstrap_room=number,
    )  # fmt: skip


def _answer_at_once(batch: Any, **_: Any) -> Any:
    from sglang.srt.managers.utils import GenerationBatchResult

    return GenerationBatchResult(next_token_ids=torch.zeros(len(batch.reqs), dtype=torch.int64))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
