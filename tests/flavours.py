"""What the suites can be pointed at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Flavour:
    """What is under test, and how an engine of it is started."""

    name: str  # "plugin" or "native"
    plugins: str  # value of SGLANG_PLUGINS
    switches_live: bool  # whether a running engine can be told another block size

    @property
    def environ(self) -> dict[str, str]:
        return {"SGLANG_PLUGINS": self.plugins}


FLAVOURS = {
    "plugin": Flavour("plugin", "dcp_block,dcp_block_cpu", switches_live=True),
    "native": Flavour("native", "dcp_block_cpu", switches_live=False),
}
STOCK = Flavour("stock", "dcp_block_cpu", switches_live=False)
