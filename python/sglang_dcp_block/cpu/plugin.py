"""The SGLang plugin that installs the shims of the CPU environment, and does nothing outside it.

SGLang swallows what a plugin raises and would serve on, unpatched.  Here that would mean wrong tokens, so a shim that
cannot be installed ends the process: ``SystemExit`` passes through SGLang's ``except Exception``.
"""

from __future__ import annotations

import logging
import os

from sglang_dcp_block.cpu.environment import SWITCH

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point ``dcp_block_cpu`` of the group ``sglang.srt.plugins``: install the shims, or end the process.

    Does nothing unless ``SGLANG_DCP_BLOCK_CPU=1``.

    Raises:
        SystemExit: a shim could not be installed; the message names its target and the SGLang version.
    """
    if os.environ.get(SWITCH) != "1":
        return
    try:
        from sglang_dcp_block.cpu import shims

        shims.install_all()
    except Exception as error:
        message = f"the CPU environment of sglang-dcp-block cannot be set up: {error}"
        logger.error(message, exc_info=True)
        raise SystemExit(message) from error
