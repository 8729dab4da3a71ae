"""``python tied.py COMMAND ...``: become a command that is killed when the process that started it is gone.

A killed pytest runs no fixture's end.  SGLang's own processes are tied to the one that started them in the same way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    starter, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() == starter:  # else it was gone before
        os.execvp(command[0], command)


def tied(command: list[str]) -> list[str]:
    """The command, to be started by this process."""
    return [sys.executable, __file__, str(os.getpid()), *command]


if __name__ == "__main__":
    main()
