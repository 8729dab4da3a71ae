"""Which servers with blocks may start."""

import libcst.matchers as m

from upstream.edit import assigns, before, exchange, on

ADMISSION = (
    on(
        "sglang.srt.arg_groups.dcp_block_hook",
        "validate_dcp_block_size",
        before(
            assigns("model_config"),
            """
            if cfg.disaggregation_mode == "decode" and not use_mla_backend(server_args):
                raise ValueError(
                    "--dcp-block-size > 1 requires an MLA model on a decode server of PD "
                    "disaggregation."
                )
            """,
        ),
        exchange(
            "the key of disaggregation",
            m.SimpleString('"--disaggregation-mode"'),
            '"KV transfer in PD disaggregation over anything but Mooncake"',
        ),
        exchange(
            "the test for disaggregation",
            m.Comparison(left=m.Attribute(attr=m.Name("disaggregation_mode"))),
            """(
                cfg.disaggregation_mode != "null"
                and cfg.disaggregation_transfer_backend not in ("mooncake", "fake")
            )""",
        ),
    ),
)
