"""The release and the patched tree, on the files that the series touch."""

from __future__ import annotations

import pytest

from upstream import commit, tree, wheel


@pytest.fixture(scope="session")
def release():
    """The pinned SGLang of this environment, every file with its recorded hash."""
    found = wheel.installed(wheel.VERSION)
    assert found is not None, "expected the pinned SGLang in this environment, as its wheel has it"
    return found


@pytest.fixture(scope="session")
def touched(release):
    """Files of the release that the series change; others of them they add first."""
    flat = [one for name in commit.ALL for one in commit.load(name)]
    paths = [tree.source_path(module).removeprefix("python/") for module in tree.touched(flat)]
    return [path for path in paths if path in release.hashes]


@pytest.fixture(scope="session")
def built(release, touched, tmp_path_factory):
    """(folder, {series: (first, last)}): every commit made."""
    folder = tmp_path_factory.mktemp("series") / "tree"
    tree.start(folder, release, touched)
    spans = {}
    for name in commit.ALL:
        first = tree.git(folder, "rev-parse", "HEAD").strip()
        for one in commit.load(name):
            tree.add(folder, one)
        spans[name] = (first, tree.git(folder, "rev-parse", "HEAD").strip())
    return folder, spans


@pytest.fixture(scope="session")
def series_context():
    """Patched modules are loaded beside installed ones, whose ``runtime_context`` lacks the function of the series."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang.srt.runtime_context.dcp_interleave_size", lambda: 1, raising=False)
        yield
