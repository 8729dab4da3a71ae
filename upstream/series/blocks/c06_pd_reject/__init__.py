"""A peer that does not fit is rejected; raised, the error would end a prefill server's bootstrap or a decode server."""

from upstream.edit import after, assigns, attempt, before, calls, compares, condition, defines, on, reads, tests

MESSAGE = """
[PD] Reject a peer that does not fit, and go on with the others

A registration whose DCP sizes or row sizes do not fit raises in the
prefill server's only bootstrap thread. The thread ends, and with it the
bootstrap of every later request, from any decode server.

Record the reason like a state layout mismatch instead: requests of that
session fail with it, and the thread and all other sessions go on. A
rejected session may have no metadata, so get_max_transfer_tokens must
not expect any.

On the decode server, a prefill server with another page size, KV layout
or PP size raises in the scheduler's loop, which ends the server. Fail
the requests that came through that prefill server with the reason, and
serve those of others. Requests of the next second are told the same;
a later one asks it anew.
"""

CONN = "sglang.srt.disaggregation.mooncake.conn"
DECODE = "sglang.srt.disaggregation.decode"

BOOTSTRAP = (
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
                logger.exception("Rejecting decode session %s: %s", mooncake_session_id, reason)
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

PREALLOC = (
    on(
        DECODE,
        "DecodePreallocQueue.__init__",
        after(
            assigns("self._ensure_last_attempt_time"),
            """
            # When and why a prefill server was rejected. For a retry interval, later
            # requests to it are told so without asking it again.
            self._prefill_rejections: Dict[str, Tuple[float, str]] = {}
            """,
        ),
    ),
    on(
        DECODE,
        "DecodePreallocQueue._ensure_prefill_info",
        before(
            assigns("last_attempt"),
            """
            rejected_at, reason = self._prefill_rejections.get(bootstrap_addr, (0.0, ""))
            if reason and now - rejected_at < self._ensure_retry_interval:
                self._reject_prefill(bootstrap_addr, reqs, reason)
                continue
            """,
        ),
    ),
    on(
        DECODE,
        "DecodePreallocQueue._ensure_prefill_info",
        before(
            tests() & calls("try_ensure_parallel_info"),
            """
            try:
                is_ready = self.kv_manager.try_ensure_parallel_info(bootstrap_addr)
            except (RuntimeError, AssertionError) as e:
                # It does not fit this server, and would not on the next attempt.
                self._ensure_retry_count.pop(bootstrap_addr, None)
                self._ensure_last_attempt_time.pop(bootstrap_addr, None)
                reason = str(e) or repr(e)
                self._prefill_rejections[bootstrap_addr] = now, reason
                self._reject_prefill(bootstrap_addr, reqs, reason)
                continue
            """,
        ),
    ),
    on(
        DECODE,
        "DecodePreallocQueue._ensure_prefill_info",
        condition(calls("try_ensure_parallel_info"), "is_ready"),
    ),
    on(
        DECODE,
        "DecodePreallocQueue",
        before(
            defines("prefetch_prefill_dp_rank_queries"),
            '''
            def _reject_prefill(
                self, bootstrap_addr: str, reqs: List[DecodeRequest], reason: str
            ) -> None:
                """Fail the requests that this prefill server would have served."""
                logger.error("Rejecting prefill server %s: %s", bootstrap_addr, reason)
                for decode_req in reqs:
                    receiver = decode_req.kv_receiver
                    # None: taken out of the queue. Failed: it has its reason.
                    if receiver is not None and receiver.conclude_state != KVPoll.Failed:
                        receiver.abort()
                        self.kv_manager.record_failure(receiver.bootstrap_room, reason)
            ''',
        ),
    ),
)

EDITS = BOOTSTRAP + PREALLOC
