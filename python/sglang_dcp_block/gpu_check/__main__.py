"""``python -m sglang_dcp_block.gpu_check``: run all checks on this machine's GPU, or small ones in Triton's interpreter."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PROGRAM = "python -m sglang_dcp_block.gpu_check"
NO_GPU = 3  # exit status
NOT_ON_A_GPU = (
    "NOT RUN ON A GPU: no CUDA device here. Kernels ran in Triton's interpreter on small sizes; CUDA graphs and times were "
    "left out."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status, as ``--help`` explains it."""
    cli = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Check this project's kernels on one GPU, all ranks simulated on it. Needs torch, Triton and NumPy.",
        epilog=f"examples:\n  {PROGRAM}\n  {PROGRAM} --no-times\n  {PROGRAM} --require-gpu\n\n"
        "Without a GPU, small checks run in Triton's interpreter, and the last line says so.\n\n"
        "exit status: 0 if every check that ran held, on a GPU or not; 1 if something did not, or blocks cost more\n"
        f"than allowed; 2 for wrong use or a package that is missing; {NO_GPU} with --require-gpu and without a GPU",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--no-times", action="store_true", help="leave the times out")
    cli.add_argument(
        "--require-gpu", action="store_true", help=f"without a CUDA device, check nothing and exit with {NO_GPU}"
    )
    args = cli.parse_args(argv)

    for package in ("torch", "triton", "numpy"):
        if importlib.util.find_spec(package) is None:
            cli.error(f"expected {package} in this Python, got none: pip install {package}")
    import torch

    on_gpu = torch.cuda.is_available()
    if args.require_gpu and not on_gpu:
        print(
            f"{PROGRAM}: error: --require-gpu: expected a CUDA device, torch {torch.__version__} sees none",
            file=sys.stderr,
        )
        return NO_GPU
    # Read when the kernels are defined, so before they are imported.
    os.environ["TRITON_INTERPRET"] = "0" if on_gpu else "1"
    import triton

    device = torch.device("cuda" if on_gpu else "cpu")
    name = torch.cuda.get_device_name(device) if on_gpu else "Triton's interpreter on the CPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{name}; {versions}", flush=True)
    began = time.perf_counter()
    held = run_checks(device)
    if on_gpu and not args.no_times:
        held = run_times(device) and held
    print(f"{time.perf_counter() - began:.0f} s. " + ("Everything held." if held else "FAILED."))
    if not on_gpu:
        print(NOT_ON_A_GPU)
    return 0 if held else 1


def run_checks(device: torch.device) -> bool:
    """Run every check, whatever the others say; whether all held."""
    from sglang_dcp_block.gpu_check import checks, report
    from sglang_dcp_block.kernels import launch

    if (device.type == "cuda") == launch.INTERPRETED:
        raise RuntimeError("sglang_dcp_block.kernels was imported before: expected TRITON_INTERPRET to be set here")
    scale, rows, held = checks.Scale.of(device), [], True
    for name, check in checks.CHECKS:
        began = time.perf_counter()
        try:
            result, what = "held", check(scale)
        except checks.Skipped as reason:
            result, what = "skipped", str(reason)
        except Exception as error:  # a kernel that does not compile or crashes: the other checks still tell something
            result, what, held = "FAILED", f"{type(error).__name__}: {error}", False
        rows.append((name, result, f"{time.perf_counter() - began:.1f}", what))
    report.show("checks", ("check", "result", "s", "what"), rows)
    return held


def run_times(device: torch.device) -> bool:
    """Measure and print; whether larger blocks cost no more than allowed."""
    from sglang_dcp_block.gpu_check import report, timing

    times = timing.measure(device)
    overall = timing.total(times)
    report.show(
        f"microseconds a launch: {timing.NUM_REQUESTS} requests x {timing.CONTEXT} tokens, DCP {timing.DCP_SIZE}",
        ("kernel", *(f"B={block}" for block in timing.BLOCKS), "ratio"),
        [
            (t.name, *(f"{t.microseconds[block]:.1f}" for block in timing.BLOCKS), f"{t.ratio:.2f}")
            for t in [*times, overall]
        ],
    )
    if overall.ratio > timing.MOST:
        print(f"blocks of {timing.BLOCKS[1]} cost {overall.ratio:.2f} times those of 1, allowed {timing.MOST}")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
