"""The environment variables under which stock SGLang runs without a GPU.

Plain data and one pure function; importing this module imports neither SGLang nor torch.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

SWITCH = "SGLANG_DCP_BLOCK_CPU"
"""Set to ``1``: the shims of :mod:`sglang_dcp_block.cpu.plugin` go in.  Otherwise they stay out."""

RAGGED_LSE = "SGLANG_DCP_BLOCK_CPU_RAGGED_LSE"
"""``2`` (default) or ``e``: base of the log-sum-exp that the stand-in for FlashInfer's ragged wrapper returns."""

TORCH_MERGE = "SGLANG_DCP_BLOCK_CPU_TORCH_MERGE"
"""Set to ``1``: torch instead of the interpreted Triton kernel in the merge of partial attention outputs."""

PLUGIN = "dcp_block_cpu"
"""Name of the entry point in SGLang's plugin group."""

PLUGIN_GROUP = "sglang.srt.plugins"

PRELOAD = Path(__file__).parent / "preload"
"""Folder of modules that must shadow others before SGLang is imported."""

SCRIPTS = sysconfig.get_path("scripts")
"""Folder of this Python's programs: ``python``, ``sglang``, ``pytest``."""

MAX_RANKS = 1024
"""More than any server here has; the variables stay far below what a process can be started with."""

REQUIRED = {
    # The plugin is installed beside SGLang for good; this is what wakes it.
    SWITCH: "1",
    # SGLang's Triton kernels run as NumPy programs; read when triton is imported.
    "TRITON_INTERPRET": "1",
    # Without it SGLang's is_cpu() is false, and layers look for CUDA kernels.
    "SGLANG_USE_CPU_ENGINE": "1",
    # The stand-in for sgl_kernel has no wheel whose version could be checked.
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    # A machine with a GPU must behave as one without.
    "CUDA_VISIBLE_DEVICES": "",
}
"""Always set, whatever they were."""

DEFAULTS = {
    # Ranks share few cores: more OpenMP threads only spin against each other.
    "OMP_NUM_THREADS": "1",
    # Small helpers that SGLang compiles run as they are: a first run compiles for 20 seconds, and needs a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # Silences a warning in every forked child.
    "TOKENIZERS_PARALLELISM": "false",
    # Checkpoints are local folders; a look-up would only wait for a timeout.
    "HF_HUB_OFFLINE": "1",
    # The stand-ins for FlashInfer's wrappers use no workspace; the default would take 384 MiB a rank.
    "SGLANG_FLASHINFER_WORKSPACE_SIZE": str(1 << 20),
    # Prefill/decode disaggregation: Mooncake over TCP on this machine, no RDMA device needed.
    "MC_FORCE_TCP": "1",
    "MOONCAKE_PROTOCOL": "tcp",
    "SGLANG_HOST_IP": "127.0.0.1",
}
"""Set only where they are unset."""


def cpu_environment(
    ranks: int, environ: Mapping[str, str] | None = None, cores: Sequence[int] | None = None
) -> dict[str, str]:
    """Map a number of ranks to the variables that let stock SGLang run with them on CPU cores.

    Rank ``i`` gets core ``cores[i % len(cores)]``.  ``PATH`` begins with :data:`SCRIPTS`, as if its virtual environment were
    active.  ``PYTHONPATH`` keeps what it had, behind the folder of pre-import stand-ins; a plugin allow-list
    (``SGLANG_PLUGINS``) is widened by the shims' plugin.

    Args:
        ranks: scheduler processes of one server (``tp_size * pp_size * dp_size``), 1 to :data:`MAX_RANKS`.  More than
            a server uses do no harm.
        environ: the environment to add to; default ``os.environ``.
        cores: ids of the cores to use; default those that this process may run on, in ascending order.

    Returns:
        Only the variables to add or change.  They must be in the environment before Python starts: hand them to a child
        process.  Applying the function to its own result changes nothing.

    Raises:
        ValueError: ``ranks`` is outside its bounds, or ``cores`` is empty.

    Example:
        >>> cpu_environment(3, {}, cores=[4, 7])["SGLANG_CPU_OMP_THREADS_BIND"]
        '4|7|4'
        >>> import os, subprocess, sys
        >>> script = "import os; print(os.environ['TRITON_INTERPRET'])"
        >>> environ = {**os.environ, **cpu_environment(2)}
        >>> subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True).stdout
        '1\\n'
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks: expected 1 to {MAX_RANKS}, got {ranks}")
    old = os.environ if environ is None else environ
    usable = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
    if not usable:
        raise ValueError("cores: expected at least one core, got none")
    new = dict(REQUIRED)
    # Without one entry a rank, SGLang wants a NUMA node a rank.
    new["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(usable[rank % len(usable)]) for rank in range(ranks))
    new.update({name: value for name, value in DEFAULTS.items() if name not in old})
    new["PYTHONPATH"] = _first(str(PRELOAD), old.get("PYTHONPATH", ""))
    new["PATH"] = _first(SCRIPTS, old.get("PATH", os.defpath))
    allowed = [name for name in map(str.strip, old.get("SGLANG_PLUGINS", "").split(",")) if name]
    if allowed and PLUGIN not in allowed:
        new["SGLANG_PLUGINS"] = ",".join([*allowed, PLUGIN])
    return new


def _first(folder: str, folders: str) -> str:
    """``folders`` of a search path, ``folder`` first and once."""
    rest = [entry for entry in folders.split(os.pathsep) if entry and entry != folder]
    return os.pathsep.join([folder, *rest])
