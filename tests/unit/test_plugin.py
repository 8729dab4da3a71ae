"""The entry point, on an SGLang that has blocks itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from sglang_dcp_block import plugin

FIELDS = "sglang.srt.arg_groups.fields.parallel"


def sglang_with(monkeypatch, *names):
    monkeypatch.setitem(sys.modules, FIELDS, SimpleNamespace(Parallel=SimpleNamespace(__struct_fields__=names)))


def test_a_fork_with_blocks_ends_the_process(monkeypatch):
    sglang_with(monkeypatch, "dcp_size", "dcp_block_size")
    with pytest.raises(SystemExit, match="pip uninstall sglang-dcp-block"):
        plugin.register()


def test_sglang_as_released_is_no_fork(monkeypatch):
    plugin.refuse_built_in()
    sglang_with(monkeypatch, "dcp_size")
    plugin.refuse_built_in()


def test_an_sglang_without_that_module_is_left_to_the_other_checks(monkeypatch):
    monkeypatch.setitem(sys.modules, FIELDS, None)
    plugin.refuse_built_in()
