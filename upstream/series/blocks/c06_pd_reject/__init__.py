"""A decode server whose geometry does not fit is rejected; raised, the error would end the bootstrap thread."""

from upstream.edit import after, attempt, before, compares, condition, defines, on, reads, tests

MESSAGE = """
[PD] Reject a decode peer that does not fit, not the bootstrap thread

A registration whose DCP sizes or row sizes do not fit raises in the
prefill server's only bootstrap thread. The thread ends, and with it the
bootstrap of every later request, from any decode server.

Record the reason like a state layout mismatch instead: requests of that
session fail with it, and the thread and all other sessions go on. A
rejected session may have no metadata, so get_max_transfer_tokens must
not expect any.
"""

CONN = "sglang.srt.disaggregation.mooncake.conn"

EDITS = (
    on(
        CONN,
        "MooncakeKVManager.start_prefill_thread.bootstrap_thread",
        attempt(
            compares("room", '"None"'),
            """
            except Exception as e:
                self._reject_peer(mooncake_session_id, f"{type(e).__name__}: {e}")
            """,
        ),
    ),
    on(
        CONN,
        "MooncakeKVManager",
        after(
            defines("_publish_peer_registration"),
            '''
            def _reject_peer(self, mooncake_session_id: str, reason: str) -> None:
                """Fail this session's requests with `reason`, until it registers again."""
                logger.error("Rejecting decode session %s: %s", mooncake_session_id, reason)
                with self.session_lock:
                    self._unblacklist_session(mooncake_session_id)
                    self.state_strides_validated.discard(mooncake_session_id)
                    self.state_layout_rejections[mooncake_session_id] = reason
            ''',
        ),
    ),
    on(
        "sglang.srt.disaggregation.common.conn",
        "CommonKVSender.get_max_transfer_tokens",
        before(tests() & reads("requires_dcp_relayout"), "registration = self.kv_mgr.decode_kv_args_table.get(peer)"),
    ),
    on(
        "sglang.srt.disaggregation.common.conn",
        "CommonKVSender.get_max_transfer_tokens",
        condition(
            reads("requires_dcp_relayout"),
            """(
            not info.is_dummy
            and registration is not None
            and registration.requires_dcp_relayout
            )""",
        ),
    ),
)
