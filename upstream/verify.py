"""``make upstream-verify``: the tree without the plugin passes its own tests, upstream's kits and the engine suite.

The tree's package shadows the installed one by ``PYTHONPATH``; SGLang may load the plugin ``dcp_block_cpu`` alone, the
stand-ins that let it run without a GPU, and the engine suite reads from the processes that nothing else was loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_dcp_block.cpu.environment import cpu_environment
from upstream import build, commit, tree

KITS = Path("tests/upstream_kits")
# Serving, prefill to decode, and faults between the two; the PD suites need Mooncake.
ENGINE = tuple(Path("tests/engine") / f"{name}.py" for name in ("test_native", "test_pd_native", "test_pd_faults"))


@dataclass(frozen=True)
class Count:
    """What a test run did."""

    passed: int
    failed: int
    skipped: int

    @property
    def is_good(self) -> bool:
        """Whether something ran and nothing failed."""
        return self.passed > 0 and self.failed == 0

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Python imports the SGLang of ``folder``, on CPUs, and no plugin but the stand-ins."""
    path = os.pathsep.join(filter(None, [str(folder / "python"), environ.get("PYTHONPATH", "")]))
    base = {**environ, "PYTHONPATH": path, "SGLANG_PLUGINS": "dcp_block_cpu"}
    return {**base, **cpu_environment(1, base)}


def count(report: Path) -> Count:
    """The counts of a JUnit report; subtests count as the test that they are in."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in totals:
            totals[name] += int(suite.get(name, "0"))
    failed = totals["failures"] + totals["errors"]
    return Count(totals["tests"] - failed - totals["skipped"], failed, totals["skipped"])


def run(root: Path, folder: Path, tests: list[Path], report: Path) -> Count:
    """Run tests with pytest on the tree in ``folder``; a run without a report counts as one failure."""
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *map(str, tests)]
    done = subprocess.run(
        command, cwd=root, env=environment(folder, os.environ), capture_output=True, text=True, check=False
    )
    result = count(report) if report.is_file() else Count(0, 1, 0)
    if not result.is_good:
        print(f"\n{done.stdout[-4000:]}{done.stderr[-2000:]}", file=sys.stderr)
    return result


def main(root: Path, version: str, engine: bool) -> int:
    """Build, then verify; returns an exit status."""
    if build.main(root, version):
        return 1
    work = root / "build" / "upstream"
    base, step, reports = work / "tree", work / "step", work / "reports"
    lines: list[tuple[str, Count]] = []

    def note(name: str, result: Count) -> None:
        lines.append((name, result))
        print(f"{name}: {result}", flush=True)

    tree.clone(base, step, tree.RELEASED)
    note(f"upstream's kits on {version} as released", run(root, step, [root / KITS], reports / "kits-before.xml"))
    revisions = tree.git(base, "rev-list", "--reverse", f"{tree.RELEASED}..HEAD").split()
    commits = [one for name in commit.ALL for one in commit.load(name)]
    for revision, one in zip(revisions, commits, strict=True):
        if tests := [step / path for path in one.new_files() if path.startswith("test/")]:
            tree.git(step, "checkout", "--quiet", revision)
            note(f"{one.name}, its own tests", run(root, step, tests, reports / f"{one.name}.xml"))
    tree.git(step, "checkout", "--quiet", revisions[-1])
    note("all tests of the series on its last commit", run(root, step, [step / "test"], reports / "all.xml"))
    note("upstream's kits on the last commit", run(root, step, [root / KITS], reports / "kits-after.xml"))
    if engine:
        os.environ |= {"DCP_BLOCK_UNDER_TEST": "native", "DCP_BLOCK_NATIVE_TREE": str(step)}
        for suite in ENGINE:
            note(f"the real engine, {suite.stem}", _engine(root, suite, reports / f"{suite.stem}.xml"))
    before, after = (result for name, result in lines if "kits" in name)
    good = all(result.is_good for _, result in lines) and before.passed == after.passed
    print("upstream-verify:", "passed" if good else "FAILED")
    return 0 if good else 1


def _engine(root: Path, suite: Path, report: Path) -> Count:
    """An engine suite sets the environment of its engines itself: the test process keeps the installed SGLang."""
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "slow or not slow",
        f"--junitxml={report}",
        str(root / suite),
    ]
    subprocess.run(command, cwd=root, check=False)
    return count(report) if report.is_file() else Count(0, 1, 0)
