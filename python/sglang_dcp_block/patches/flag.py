"""How a block size gets in: the command line flag, the Engine keyword, the environment variable; and its resolution.

The request rides on SGLang's ``ServerArgs`` record as an underscore attribute, which the record keeps through pickling to
every scheduler process.  Resolution happens inside SGLang's own pipeline, at steps that plugins may wrap
(``register_resolution_hook``), so the page size and the attention backend are declared the way SGLang's defaults are, and
the block size is final before any process is spawned.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sglang_dcp_block import config
from sglang_dcp_block.config import BlockSizeError, GroupRequest, Request
from sglang_dcp_block.patches import pd_release, register
from sglang_dcp_block.patches.facts import attention_is_mla, facts_of
from sglang_dcp_block.refused import end_with_the_text
from sglang_dcp_block.support import GQA_BACKENDS, MLA_BACKENDS, require_groupable, require_supported

logger = logging.getLogger(__name__)

_REQUEST = "_dcp_block_request"  # (value, source), as asked for
_GROUP_REQUEST = "_dcp_group_request"  # (decode ranks, source), as asked for
_GROUPED = "_dcp_group_pages"  # decode ranks, final; missing where nothing was asked for
_RESOLVED = "_dcp_block_size"  # tokens, final; read by every process; 0 where SGLang runs as it is

Step = Callable[[Any], None]


def request_of(server_args: Any) -> Request | None:
    """What was asked for on this record: flag or keyword first, else the environment variable."""
    asked = getattr(server_args, _REQUEST, None)
    return Request(*asked) if asked else config.from_environment(os.environ)


def armed_block_size(server_args: Any) -> int | None:
    """The resolved block size in tokens that processes are armed with; None where SGLang runs as it is.

    Raises:
        BlockSizeError: blocks were asked for and never resolved (SGLang skips resolution for dummy models).
    """
    resolved: int | None = getattr(server_args, _RESOLVED, None)
    if resolved is None:
        request = request_of(server_args)
        if request is not None and request.wants_blocks:
            raise BlockSizeError(
                f"{request}: expected a record that SGLang resolved with the plugin loaded, got "
                "one without a block size. Pass a real --model-path, and call load_plugins() before resolve_once()."
            )
    return resolved or None


def armed_group_pages(server_args: Any) -> int:
    """For how many decode ranks this server groups pages; 0 where it does not.

    Raises:
        BlockSizeError: grouping was asked for and never resolved (SGLang skips resolution for dummy models).
    """
    resolved: int | None = getattr(server_args, _GROUPED, None)
    if resolved is None and (asked := getattr(server_args, _GROUP_REQUEST, None)) is not None:
        raise BlockSizeError(
            f"{GroupRequest(*asked)}: expected a record that SGLang resolved with the plugin loaded, got one that was "
            "not. Pass a real --model-path, and call load_plugins() before resolve_once()."
        )
    return resolved or 0


# --- the ways in ---------------------------------------------------------------------------------------------------


class _FlagAction(argparse.Action):
    """Parses a flag; refuses it where the hook that would carry it to the schedulers is missing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            parse = config.parse if self.dest == config.KEYWORD else _grouping
            request = parse(values, option_string or self.option_strings[0])
            register.verify(light_points())
        except (BlockSizeError, register.PatchError) as error:
            text = str(error).removeprefix(f"{option_string}: ")  # argparse names the flag itself
            raise argparse.ArgumentError(self, text) from error
        setattr(namespace, self.dest, request)


def _grouping(value: object, source: str) -> GroupRequest:
    return GroupRequest(config.parse_group_pages(value, source), source)


def add_flag(result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER ``ServerArgs.add_cli_args``."""
    parser.add_argument(
        config.FLAG,
        config.ALIAS,
        dest=config.KEYWORD,
        action=_FlagAction,
        metavar="N|auto",
        default=None,
        help=config.HELP,
    )
    parser.add_argument(
        config.GROUP_FLAG,
        dest=config.GROUP_KEYWORD,
        action=_FlagAction,
        metavar="P",
        default=None,
        help=config.GROUP_HELP,
    )


def carry_flag(result: Any, cls: type, args: argparse.Namespace) -> None:
    """AFTER ``ServerArgs.from_cli_args``: put the parsed requests on the record.  This is a command, not a program."""
    _attach(result, getattr(args, config.KEYWORD, None), getattr(args, config.GROUP_KEYWORD, None))
    end_with_the_text()


def install_engine_keyword() -> None:
    """Let ``Engine(dcp_block_size=...)`` through: SGLang builds the record by calling ``Engine.server_args_class``.

    SGLang's child processes build no Engine and are spared the import.
    """
    if "sglang.srt.entrypoints.engine" not in sys.modules and multiprocessing.parent_process() is not None:
        return
    from sglang.srt.entrypoints.engine import Engine

    build = Engine.server_args_class

    def server_args_with_block_size(**kwargs: Any) -> Any:
        value, ranks = kwargs.pop(config.KEYWORD, None), kwargs.pop(config.GROUP_KEYWORD, None)
        record = build(**kwargs)
        if value is not None or ranks is not None:
            register.verify(light_points())
        request = None if value is None else config.parse(value, f"Engine({config.KEYWORD}=...)")
        grouped = None if ranks is None else _grouping(ranks, f"Engine({config.GROUP_KEYWORD}=...)")
        _attach(record, request, grouped)
        return record

    Engine.server_args_class = staticmethod(server_args_with_block_size)


def _attach(record: Any, request: Request | None, grouped: GroupRequest | None) -> None:
    if request is not None:
        setattr(record, _REQUEST, (request.value, request.source))
    if grouped is not None:
        setattr(record, _GROUP_REQUEST, (grouped.ranks, grouped.source))


# --- resolution ----------------------------------------------------------------------------------------------------


def install_resolution() -> None:
    """Wrap the three steps of SGLang's argument resolution that the block size takes part in."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_decode_context_parallelism")(_choose_page_size)
    register_resolution_hook("handle_attention_backend_compatibility")(_choose_backend)
    register_resolution_hook("handle_model_capability_adjustments")(_finish)


def _choose_page_size(server_args: Any, previous: Step) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    previous(server_args)
    request = request_of(server_args)
    if request is None or not request.wants_blocks:
        return
    register.verify(light_points())
    asked = resolving_view(server_args).page_size
    chosen = config.page_size_for(request, asked)
    if chosen != asked:
        logger.warning("%s: --page-size is unset, taking %d tokens.", request, chosen)
        declare_resolution(server_args, "sglang_dcp_block", page_size=chosen)


# Defaults of a platform or for speed.  Any other one is what the model itself needs: it stays, and is refused.
_GENERAL_BACKENDS = frozenset(
    {
        "aiter",
        "cutedsl_mla",
        "fa3",
        "fa4",
        "flashinfer",
        "flashmla",
        "intel_amx",
        "torch_native",
        "trtllm_mha",
        "trtllm_mla",
    }
)


def _choose_backend(server_args: Any, previous: Step) -> None:
    from sglang.srt.arg_groups.model_override_base import (
        get_default_attn_backend,
        is_attention_backend_not_set,
        model_config_of,
    )
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    request, cfg = request_of(server_args), resolving_view(server_args)
    # The record is the user's own input; what SGLang chose for the platform or the model shows in the view alone.
    unset = is_attention_backend_not_set(server_args)
    split = cfg.prefill_attention_backend or cfg.decode_attention_backend
    if request is not None and request.wants_blocks and unset and not split:
        is_mla = attention_is_mla(server_args)
        usable = MLA_BACKENDS if is_mla else GQA_BACKENDS
        default = cfg.attention_backend
        if default is None:
            default = get_default_attn_backend(server_args, is_mla, model_config_of(server_args))
        if default in _GENERAL_BACKENDS - set(usable):
            logger.warning(
                "%s: --attention-backend is unset and SGLang's default here, %s, cannot read blocks; taking %s.",
                request, default, usable[0],
            )  # fmt: skip
            declare_resolution(server_args, "sglang_dcp_block", attention_backend=usable[0])
    previous(server_args)


def _finish(server_args: Any, previous: Step) -> None:
    """Everything else is resolved: fix block size and grouping, refuse what does not fit, and check upstream's source."""
    previous(server_args)
    _finish_blocks(server_args)
    _finish_grouping(server_args)


def _finish_blocks(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_dcp_block.patches.points import server_points

    request = request_of(server_args)
    if request is None:
        return
    block_size = config.block_size_for(request, resolving_view(server_args).page_size) if request.wants_blocks else 1
    facts = facts_of(server_args, block_size)
    armed = block_size > 1 or facts.is_triton_mla_under_dcp
    if armed and facts.leaves_blocks_to_others:
        logger.warning(
            "%s: ignored on a prefill server without DCP; each decode server names its own block size.", request
        )
        armed = False
    if armed:
        require_supported(facts, request)
        if facts.disaggregation_mode == "decode" and block_size > 1:
            pd_release.tell_of_raised_hold()
        register.check(server_points(facts.disaggregation_mode, facts.hierarchical_cache))
        if request.value != block_size:
            logger.warning("%s resolves to blocks of %d tokens.", request, block_size)
    setattr(server_args, _RESOLVED, block_size if armed else 0)


def _finish_grouping(server_args: Any) -> None:
    from sglang_dcp_block.patches.points import grouping_points
    from sglang_dcp_block.patches.startup_points import CONTROLLER_POINTS

    asked = getattr(server_args, _GROUP_REQUEST, None)
    if asked is None:
        return
    request, facts = GroupRequest(*asked), facts_of(server_args, armed_block_size(server_args) or 1)
    require_groupable(facts, request)
    register.check(CONTROLLER_POINTS + grouping_points(facts.disaggregation_mode))
    setattr(server_args, _GROUPED, request.ranks)


def light_points() -> tuple[register.PatchPoint, ...]:
    """The patch points of the flag itself; imported late because their list imports this module."""
    from sglang_dcp_block.patches.startup_points import LIGHT_POINTS

    return LIGHT_POINTS
