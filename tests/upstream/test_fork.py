"""The fork's wheel: the tree's files, the release's metadata, and a version that says what it is."""

from __future__ import annotations

import importlib.metadata
import zipfile

import pytest
from packaging.version import Version

from upstream import commit, edit, fork, tree, wheel

FILES = ("sglang/_version.py", "sglang/srt/layers/dcp/layout.py")


@pytest.fixture(scope="module")
def made(release, tmp_path_factory):
    root = tmp_path_factory.mktemp("fork")
    tree.start(root / "tree", release, FILES)
    change = edit.on("sglang.srt.layers.dcp.layout", "", edit.append("END = True"))
    tree.add(root / "tree", commit.Commit("c", "Subject", "Body", (change,), root / "none"))
    (root / "tree/python/sglang/untracked.py").write_text("x = 1\n")
    return fork.build(root / "tree", release, "0.1.0", root / "dist")


def test_name_and_version(made, release):
    assert made.name.startswith(f"sglang-{release.version}+dcpblock0.1.0-cp3")
    assert Version(release.version) < Version(f"{release.version}+dcpblock0.1.0") < Version("0.5.24")
    (found,) = importlib.metadata.distributions(name="sglang", path=[str(made)])
    assert found.version == f"{release.version}+dcpblock0.1.0"
    assert {point.name for point in found.entry_points} >= {"sglang"}


def test_it_holds_the_tree_and_no_more(made):
    with zipfile.ZipFile(made) as archive:
        package = [name for name in archive.namelist() if name.startswith("sglang/")]
        assert sorted(package) == sorted(FILES)
        assert archive.read(FILES[1]).endswith(b"END = True\n")


def test_the_package_says_the_wheels_version(made):
    """``sglang.__version__``, and with it ``/server_info``."""
    said: dict[str, object] = {}
    with zipfile.ZipFile(made) as archive:
        exec(archive.read("sglang/_version.py"), said)
    assert said["__version__"] == said["version"] == "0.5.23+dcpblock0.1.0"
    assert said["__version_tuple__"] == said["version_tuple"] == (0, 5, 23, "dcpblock0.1.0")


def test_a_version_file_of_another_make_is_refused(release, tmp_path):
    class Other:
        version = "0.5.24"
        metadata = release.metadata

    tree.start(tmp_path / "tree", release, FILES)
    with pytest.raises(fork.ForkError, match=r"_version.py: expected one version 0.5.24, got 0"):
        fork.build(tmp_path / "tree", Other(), "0.1.0", tmp_path / "dist")


def test_it_is_a_wheel_by_its_own_record(made, release, tmp_path):
    again = wheel.from_wheel(made)
    assert again.version == f"{release.version}+dcpblock0.1.0"
    again.lay_out(tmp_path)
    assert set(again.metadata()) == set(release.metadata())


def test_a_number_that_is_none(release, tmp_path):
    with pytest.raises(fork.ForkError, match="digits"):
        fork.build(tmp_path, release, "0.1.0rc1", tmp_path)
