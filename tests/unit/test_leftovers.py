"""What a killed server leaves: nothing in /dev/shm, no temporary file, no process; and others' stay."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_dcp_block.cpu import leftovers
from sglang_dcp_block.cpu.leftovers import SHARED_MEMORY, Scratch, kill_group
from tied import tied

# A child process that shares memory and a semaphore with others, as SGLang's schedulers do, and is killed with them.
SHARES = """
import multiprocessing as mp, sys, time
from multiprocessing.shared_memory import SharedMemory

def work(lock, name):
    own = SharedMemory(create=True, size=8)
    print(name, own.name, lock._semlock.name, flush=True)
    time.sleep(60)

if __name__ == "__main__":
    context = mp.get_context("spawn")
    shared, lock = SharedMemory(create=True, size=8), context.Lock()
    context.Process(target=work, args=(lock, shared.name)).start()
    time.sleep(60)
"""


@pytest.fixture
def sharing(tmp_path: Path):
    script = tmp_path / "shares.py"
    script.write_text(SHARES)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    yield process
    kill_group(process.pid)
    process.communicate()


def names_of(process: subprocess.Popen[str]) -> list[Path]:
    first, second, semaphore = process.stdout.readline().split()
    return [SHARED_MEMORY / first, SHARED_MEMORY / second, SHARED_MEMORY / f"sem.{semaphore.removeprefix('/')}"]


def test_a_killed_group_leaves_no_shared_memory(sharing) -> None:
    files = names_of(sharing)
    assert all(file.exists() for file in files)
    kill_group(sharing.pid)
    assert sharing.wait(5) == -9
    assert [file for file in files if file.exists()] == []
    assert leftovers._members(sharing.pid) == []


def test_a_command_that_is_tied_ends_with_its_starter() -> None:
    """As servers and engines under test do when pytest is killed."""
    sleeps = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    script = (
        f"import subprocess, sys, time; sys.path.insert(0, {str(Path(tied.__code__.co_filename).parent)!r})\n"
        f"from tied import tied\n"
        f"child = subprocess.Popen(tied({sleeps!r}), stdout=subprocess.PIPE, start_new_session=True)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(starter.stdout.readline())
    assert leftovers._members(child) == [child]
    starter.kill()
    starter.communicate()
    until = time.monotonic() + 10
    while leftovers._members(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert leftovers._members(child) == []


@pytest.mark.parametrize("status", [0, 1, 5])
def test_a_session_ends_with_its_status_and_without_collecting(tmp_path: Path, status: int) -> None:
    """What pytest does at its end, after exit handlers like the one that removes its folders."""
    script = tmp_path / "ends.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(tied.__code__.co_filename).parent)!r})\n"
        "import atexit, conftest\n"
        "class Late:\n    def __del__(self): print('collected')\n"
        "late = Late(); late.itself = late\n"
        "atexit.register(print, 'handled')\n"
        f"conftest.pytest_sessionfinish({status})\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (status, "handled\n"), done.stderr


def test_a_group_that_is_gone() -> None:
    done = subprocess.Popen(["true"], start_new_session=True)
    done.wait()
    began = time.monotonic()
    kill_group(done.pid)
    assert time.monotonic() - began < 3


def test_a_folder_goes_with_the_memory_that_is_named_after_its_files() -> None:
    scratch = Scratch()
    socket = scratch.folder / "tmpabc_12"
    socket.touch()
    own, other = (SHARED_MEMORY / f"sglang_loads_{name}_0123abcd.shm" for name in (socket.name, "tmpabc_1"))
    own.touch()
    other.touch()
    try:
        scratch.remove()
        scratch.remove()
        assert not own.exists()
        assert other.exists(), "somebody else's"
        assert not scratch.folder.exists()
    finally:
        other.unlink()
        own.unlink(missing_ok=True)


def test_python_and_sglang_take_the_folder() -> None:
    """The name that SGLang gives its table of loads, from a file that Python's tempfile made."""
    snapshot = pytest.importorskip("sglang.srt.managers.load_snapshot")
    scratch = Scratch()
    script = "import tempfile; print(tempfile.NamedTemporaryFile(delete=False).name)"
    env = {**os.environ, **scratch.environ}
    name = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    socket = name.strip()
    assert Path(socket).parent == scratch.folder
    assert len(socket) < 100, "the path of a Unix socket has at most 107 characters"
    table = Path(snapshot.shm_path_for(f"ipc://{socket}"))
    table.touch()
    scratch.remove()
    assert not table.exists()


def test_no_port_of_mooncake_s_is_shared() -> None:
    taken = []
    for _ in range(187):
        scratch = Scratch()
        scratch.remove()
        taken.append(set(scratch.ports))
    assert sum(map(len, taken)) == len(set().union(*taken)) == 187 * 64


def test_mooncake_takes_the_ports() -> None:
    pytest.importorskip("mooncake.engine", exc_type=ImportError, reason="Mooncake does not load")
    scratch = Scratch()
    script = """
import mooncake.engine, pathlib
engine = mooncake.engine.TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
listening = [line.split() for line in pathlib.Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
own = {link.readlink().name for link in pathlib.Path("/proc/self/fd").iterdir() if link.is_symlink()}
print(*(int(row[1].rpartition(":")[2], 16) for row in listening if row[3] == "0A" and f"socket:[{row[9]}]" in own))
"""
    env = {**os.environ, **scratch.environ, "MC_FORCE_TCP": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    ports = [int(word) for word in done.stdout.split()]
    assert ports
    assert all(port in scratch.ports for port in ports), (ports, scratch.ports)
    scratch.remove()
