"""Ending a server that somebody started here, with all that SGLang would leave behind.

SGLang makes its Unix sockets as temporary files and never removes them; shared memory of theirs, and of its message queues,
outlives a process that is killed.  Who starts servers for a minute each gives each one a :class:`Scratch` folder, and ends
it with :func:`kill_group`.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

MOONCAKE_PORTS = range(20000, 32000)  # below those that Linux gives out for connections
PORTS_A_SERVER = 64  # two a rank, picked at random
SHARED_MEMORY = Path("/dev/shm")
TRACKER = b"resource_tracker"  # in the command line of the process that unlinks what Python's processes share


class Scratch:
    """What a server has to itself: a folder for temporary files, and ports for Mooncake.

    The folder's name is short enough for the paths of Unix sockets. Mooncake keeps its connections to a decode server that
    is gone, and the next one would get a dead connection where it happens to listen on the same port; so no two servers of
    a process share ports, until 187 have been started.
    """

    _numbers = itertools.count(os.getpid())  # two processes at the same time seldom use the same ports

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dcp-block-"))
        num_ranges = (MOONCAKE_PORTS.stop - MOONCAKE_PORTS.start) // PORTS_A_SERVER
        first = MOONCAKE_PORTS.start + next(self._numbers) % num_ranges * PORTS_A_SERVER
        self.ports = range(first, first + PORTS_A_SERVER)

    @property
    def environ(self) -> dict[str, str]:
        """To be added to the server's environment."""
        return {
            "TMPDIR": str(self.folder),
            "MC_MIN_RPC_PORT": str(self.ports.start),
            "MC_MAX_RPC_PORT": str(self.ports.stop - 1),
        }

    def remove(self) -> None:
        """Remove the folder, and the shared memory that SGLang has named after files in it.  Once is enough."""
        for file in self.folder.glob("*"):
            # A table of loads, named after the file and a digest of its path.
            for segment in SHARED_MEMORY.glob(f"sglang_loads_{glob.escape(file.name)}_*.shm"):
                segment.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def kill_group(leader: int, patience: float = 5.0) -> None:
    """Kill every process of a process group, and leave Python's resource trackers the time to do their work.

    A tracker unlinks the shared memory and semaphores of processes that did not; it ends when all of them are gone.

    Args:
        leader: id of the group; one that is gone is no error.
        patience: seconds until the trackers are killed, too.
    """
    while others := [pid for pid in _members(leader) if not _is_tracker(pid)]:
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    until = time.monotonic() + patience
    while _members(leader) and time.monotonic() < until:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _members(group: int) -> list[int]:
    """Processes of a group, zombies aside."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # "pid (name) state ppid pgrp ...", and the name may hold anything.
            state, _, pgrp = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


def _is_tracker(pid: int) -> bool:
    try:
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
