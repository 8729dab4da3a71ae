"""Block round-robin decode context parallelism (DCP) for SGLang.

Importing this package touches neither SGLang nor torch.  SGLang finds the plugin by its entry point
(:mod:`sglang_dcp_block.plugin`); the layout itself is :class:`sglang_dcp_block.dcp.layout.DcpLayout`.
"""

__version__ = "0.1.0"
