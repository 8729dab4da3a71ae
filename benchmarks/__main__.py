"""Command line of the suite."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.machine import machine, versions
from benchmarks.suite import BENCHMARKS
from benchmarks.writing import Provenance, write
from sglang_dcp_block.demo.progress import Steps

RESULTS = Path(__file__).parent / "results"
PROGRAM = "python -m benchmarks"

EXAMPLES = f"""\
examples:
  {PROGRAM}                              the quick suite: about 10 minutes on two idle cores
  {PROGRAM} --full                       more shapes, more rounds, the study of fragmentation
  {PROGRAM} --only transfer planning     two of them
  {PROGRAM} --only transfer --into DIR   and leave the results of the repository as they are

Results are written as NAME.md, NAME.csv and, with matplotlib (requirements/plots.txt), NAME.png.
Exit status: 0 if all figures hold that must hold, 1 if one does not.
"""


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    names = "\n".join(
        f"  {b.name:18s} {b.about}{'' if b.quick else ' (--full, or by name)'}" for b in BENCHMARKS.values()
    )
    result = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure what blocks gain and where they lose. Needs the CPU environment (make venv), no GPU.",
        epilog=f"benchmarks:\n{names}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = result.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="few shapes and rounds (the default)")
    size.add_argument("--full", action="store_true", help="all of them: an hour and more")
    result.add_argument("--only", nargs="+", choices=list(BENCHMARKS), metavar="NAME", help="these alone")
    result.add_argument(
        "--into", type=Path, default=RESULTS, metavar="DIR", help="where results go (benchmarks/results)"
    )
    return result


def chosen(full: bool, only: Sequence[str] | None) -> list[str]:
    """The names of what is to run, in the order of the suite."""
    return [name for name, benchmark in BENCHMARKS.items() if (name in only if only else full or benchmark.quick)]


def command_of(full: bool, only: Sequence[str] | None) -> str:
    """The command that measures the same again."""
    return " ".join([PROGRAM, *(["--full"] if full else []), *(["--only", *only] if only else [])])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; returns the exit status."""
    args = parser().parse_args(argv)
    console, names = Console(), chosen(args.full, args.only)
    args.into.mkdir(parents=True, exist_ok=True)
    where = str(machine())
    failed: list[str] = []
    with Steps(console, len(names)) as steps:
        for name in names:
            with steps.step(f"{name}: {BENCHMARKS[name].about}"):
                result = BENCHMARKS[name].measure(args.full)
            command = command_of(args.full, [name] if args.only else None)
            load = f"load average {os.getloadavg()[0]:.1f}"
            if not write(result, Provenance(command, versions(), where, load), args.into) and result.draw:
                steps.say("      no plot: matplotlib is not installed (pip install -r requirements/plots.txt)")
            for check in result.checks:
                steps.say(f"      {check}")
            failed += [str(check) for check in result.checks if not check.holds]
    console.print(f"Results: {os.path.relpath(args.into)}", highlight=False)
    if failed:
        console.print("\n".join(["FAILED:", *failed]), markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
