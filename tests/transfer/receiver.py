"""A decode server's memory in a process of its own: a shared file, registered with a Mooncake engine.

Arguments: the file, which the test maps too, so it sees what arrives. Prints the session, then waits for the end of its
input.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from mooncake.engine import TransferEngine


def main() -> None:
    with open(sys.argv[1], "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(address, len(memory)) == 0
    print(f"127.0.0.1:{engine.get_rpc_port()} {address}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
