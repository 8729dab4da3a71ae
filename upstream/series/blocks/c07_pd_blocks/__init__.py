"""Prefill to decode in blocks: the transfer plan, direct or packed, and how the peers agree on the block size."""

from upstream.series.blocks.c07_pd_blocks.admission import ADMISSION
from upstream.series.blocks.c07_pd_blocks.agreement import AGREEMENT
from upstream.series.blocks.c07_pd_blocks.plan import PLAN
from upstream.series.blocks.c07_pd_blocks.send import SEND
from upstream.series.blocks.c07_pd_blocks.status import STATUS

MESSAGE = """
[PD] Send KV to a decode server that interleaves DCP ranks by blocks

A decode rank of a server with --dcp-block-size B owns blocks of B
positions. On the prefill server these are runs of B neighbouring rows,
so build_dcp_token_transfer_plan takes interleave_size, and a run is one
segment instead of B. Runs of 16 KiB or more are sent as they lie: such
a peer needs no pack buffers and no limit on a transfer's length. With
SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES set, a transfer is cut into
calls of as many segments, as the page copy is already.

The peers agree first, and a stock peer can misread nothing:

- A decode server with blocks adds its block size to its /route query. A
  prefill server that knows blocks answers with its own in
  PrefillServerInfo; the field is missing for anybody else, since an
  older decode server takes no unknown key. Without it the request fails
  with the reason.
- A registration names the block size in one more frame. Page sizes that
  it does not divide, and other block sizes at equal DCP sizes, where
  pages are copied as they are, reject that session.
- Success repeats the block size. Without that it is a failure: a
  prefill server may have come back without blocks at an address whose
  answer is cached.

Nothing that the servers say to each other changes where no block size
is set; a prefill rank's own registration has one key more.
"""

# The decode server of that test asks for its block size, too.
PAGES = (
    (
        "test/registered/disaggregation/test_mooncake_peer_rejection_unit.py",
        'kv_cache_dtype_str="auto",\n',
        'kv_cache_dtype_str="auto",\n            dcp_block_size=1,\n',
    ),
)

EDITS = PLAN + AGREEMENT + STATUS + SEND + ADMISSION
