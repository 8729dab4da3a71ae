"""Whether Mooncake, the transfer engine, loads on this machine."""

from __future__ import annotations

import importlib

PACKAGE = "mooncake-transfer-engine-non-cuda"


class MooncakeMissing(Exception):
    """The transfer engine does not load; says what to install."""


def check() -> None:
    """Load the transfer engine, before a server finds out that it cannot.

    Raises:
        MooncakeMissing: as it says.
    """
    expected = "Mooncake carries KV from server to server: expected mooncake.engine to load"
    try:
        importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise MooncakeMissing(
            f"{expected}, got: {error}. Install the package {PACKAGE}; `make venv` does, in the tested version."
        ) from error
    except ImportError as error:
        if "libibverbs" in str(error):
            remedy = "apt-get install libibverbs1 (Debian, Ubuntu) or dnf install libibverbs (Fedora, RHEL)"
        else:
            remedy = "install the system library that it names"
        raise MooncakeMissing(f"{expected}, got: {error}. To do: {remedy}.") from error
