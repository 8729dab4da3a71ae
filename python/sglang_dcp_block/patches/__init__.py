"""What the plugin changes in SGLang: named patch points, and thin adapters that carry them out.

the register      fingerprint, register, points, and a ``*_points`` module a subsystem
start-up          flag, facts, arming, active, agreement, model_check
KV cache          write_door, reads, lengths, host_cache (HiCache), group_pages (order of pages)
attention         triton_gqa, triton_mla, mla_decode, mla_gather, trtllm_mla, cutedsl_mla
prefill/decode    the handshake: pd_capability, pd_registration, pd_echo, pd_decode, pd_restart, peer, peer_refusals
                  the transfer: mooncake_send, mooncake_batches, mooncake_pack, pd_release, transfer_counts, prometheus
"""
