"""All ranks place KV the same way, or none serves.

SGLang swallows a plugin's import error in each child process, so one rank could come up unarmed and store its KV token by
token among others that store blocks.  Each armed scheduler therefore reports what it is armed with together with
its start-up info; the launching process refuses to serve unless every rank of its node reported the same as it expects.
Ranks of other nodes have another launcher: there, every armed rank also posts its digest in the job's TCP store and waits,
for a bounded time, until the whole world has posted the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from sglang_dcp_block.config import GROUP_KEYWORD
from sglang_dcp_block.refused import StartRefused

REPORT_KEY = "dcp_block"  # in a scheduler's start-up info, and so in /server_info
STORE_TIMEOUT = timedelta(minutes=5)


class DisagreementError(StartRefused, RuntimeError):
    """Not all ranks are armed alike."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one scheduler is armed with, and what its pool holds."""

    block_size: int  # tokens
    dcp_size: int
    page_size: int  # tokens, per rank
    digest: str  # of the patch points; see register.digest
    plugin_digest: str  # of the plugin's text alone, which servers of other roles have in common
    capacity_tokens: int  # logical tokens over the DCP group
    rows_per_rank: int  # physical KV rows of one rank
    num_ranks: int = 1  # schedulers that this report speaks for

    def as_info(self) -> dict[str, Any]:
        """The report as plain data, for the start-up info."""
        return asdict(self)


def merged_report(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report for all schedulers of a node that agree.

    Args:
        infos: start-up infos as the schedulers sent them.
    Raises:
        DisagreementError: a scheduler reported nothing, or something else than the others.
    """
    first = infos[0].get(REPORT_KEY) if infos else None
    if first is None:
        raise DisagreementError(_explain("scheduler 0 reported no block layout: the plugin is not loaded in it"))
    for index, info in enumerate(infos):
        report = info.get(REPORT_KEY)
        if report is None:
            raise DisagreementError(
                _explain(f"scheduler {index} reported no block layout: the plugin is not loaded in it")
            )
        if _layout(report) != _layout(first):
            raise DisagreementError(
                _explain(f"scheduler {index} is armed with {_layout(report)}, scheduler 0 with {_layout(first)}")
            )
    return {**first, "num_ranks": sum(info[REPORT_KEY]["num_ranks"] for info in infos)}


def require_grouping(infos: Sequence[Mapping[str, Any]], ranks: int) -> None:
    """Refuse unless all schedulers group pages for ``ranks`` decode ranks.

    Args:
        infos: start-up infos as the schedulers sent them.
    Raises:
        DisagreementError: naming the first one that does not.
    """
    for index, info in enumerate(infos):
        if (got := info.get(GROUP_KEYWORD)) != ranks:
            raise DisagreementError(
                f"expected all schedulers to group pages for {ranks} decode ranks, got {got} from scheduler {index}. Give "
                "every node the same flags and the same versions of this plugin and of SGLang."
            )


def require_agreement(
    infos: Sequence[Mapping[str, Any]], block_size: int, digest: str, num_ranks: int
) -> dict[str, Any]:
    """Refuse unless the node's schedulers are all armed with what the launching process expects.

    Args:
        infos: start-up infos as they reached the launching process: one a scheduler, or one data-parallel controller's.
        block_size: tokens, as the launcher resolved it.
        digest: the launcher's own; see ``register.digest``.
        num_ranks: schedulers of this node.
    Returns:
        The one report of all of them.
    Raises:
        DisagreementError: saying what was expected and what was got.
    """
    merged = merged_report(infos)
    if (merged["block_size"], merged["digest"]) != (block_size, digest):
        raise DisagreementError(
            _explain(
                f"expected block size {block_size} and digest {digest}, schedulers are armed with {_layout(merged)}"
            )
        )
    if merged["num_ranks"] != num_ranks:
        raise DisagreementError(
            _explain(f"expected reports of {num_ranks} schedulers on this node, got {merged['num_ranks']}")
        )
    return merged


def require_world_agreement(
    store: Any, rank: int, world_size: int, digest: str, timeout: timedelta = STORE_TIMEOUT
) -> None:
    """Post this rank's digest in the job's key-value store, and wait until every rank has posted the same.

    Args:
        store: ``torch.distributed`` store that all ranks share.
        rank, world_size: this rank's place in the world group.
        digest: as of ``register.digest``.
        timeout: how long a rank may take to post; then the missing ones are named.
    Raises:
        DisagreementError: a rank posted another digest, or none in time. Never waits longer than ``timeout``.
    """
    keys = [f"sglang_dcp_block/digest/{r}" for r in range(world_size)]
    store.set(keys[rank], digest)
    try:
        store.wait(keys, timeout)
    except Exception as error:  # each store has its own class for a timeout
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        raise DisagreementError(
            _explain(
                f"ranks {missing} reported no block layout within {timeout.total_seconds():.0f} s: expected all "
                f"{world_size} ranks to be armed, on every node"
            )
        ) from error
    posted = [store.get(key).decode() for key in keys]
    others = {r: d for r, d in enumerate(posted) if d != digest}
    if others:
        raise DisagreementError(_explain(f"rank {rank} is armed with digest {digest}, other ranks with {others}"))


def _layout(report: Mapping[str, Any]) -> str:
    return f"block size {report['block_size']}, dcp size {report['dcp_size']}, digest {report['digest']}"


def _explain(what: str) -> str:
    return (
        f"the ranks do not agree on the KV layout, so none may serve: {what}. Install the same sglang-dcp-block and "
        "SGLang on every node, give every node the same --dcp-block-size, and look for a plugin error in that rank's log."
    )
