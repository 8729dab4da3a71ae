"""What the suites can be pointed at."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# The tree that `python -m upstream` makes; its package shadows the installed one in engines of the native flavour.
TREE = Path(os.environ.get("DCP_BLOCK_NATIVE_TREE") or Path(__file__).parents[1] / "build" / "upstream" / "tree")


@dataclass(frozen=True)
class Flavour:
    """What is under test, and how an engine of it is started."""

    name: str  # "plugin" or "native"
    plugins: str  # value of SGLANG_PLUGINS
    switches_live: bool  # whether a running engine can be told another block size
    tree: Path | None = None  # a source tree of SGLang, in place of the installed one

    @property
    def environ(self) -> dict[str, str]:
        environ = {"SGLANG_PLUGINS": self.plugins}
        if self.tree is not None:
            path = [str(self.tree / "python"), os.environ.get("PYTHONPATH", "")]
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        return environ


FLAVOURS = {
    "plugin": Flavour("plugin", "dcp_block,dcp_block_cpu", switches_live=True),
    "native": Flavour("native", "dcp_block_cpu", switches_live=False, tree=TREE),
}
STOCK = Flavour("stock", "dcp_block_cpu", switches_live=False)
