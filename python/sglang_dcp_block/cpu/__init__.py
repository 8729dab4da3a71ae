"""Stock SGLang, with tensor and decode context parallelism, on a machine without a GPU.

For tests, examples and trying things out.  The engine, the HTTP server, schedulers, KV pools, the radix cache and the
Triton kernels (in Triton's interpreter) are SGLang's own; only what cannot exist without CUDA has a stand-in:

* :mod:`~sglang_dcp_block.cpu.environment`: the environment variables; ``python -m sglang_dcp_block.cpu`` sets them;
* ``preload/``: modules that must be there before SGLang is imported (on ``PYTHONPATH``);
* :mod:`~sglang_dcp_block.cpu.plugin`: an SGLang plugin that installs ``shims/``, and outside this environment nothing;
* :mod:`~sglang_dcp_block.cpu.checkpoints`, :mod:`~sglang_dcp_block.cpu.smollm2`: models small enough for it.

It is slow (up to seconds a token) and exact: float32 log-probabilities agree with a single rank's to about 1e-5.  For
x86-64 Linux.  Without a stand-in: CUDA graphs, FP8, speculative decoding, the packed transfers of disaggregation.
"""

from sglang_dcp_block.cpu.environment import cpu_environment

__all__ = ["cpu_environment"]
