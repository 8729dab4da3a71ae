"""The modules of SGLang that move KV from prefill to decode servers, and the manager in one of them."""

COMMON = "sglang.srt.disaggregation.common.conn"
MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
ASCEND = "sglang.srt.disaggregation.ascend.conn"
UTILS = "sglang.srt.disaggregation.common.utils"
MANAGER = "MooncakeKVManager"
