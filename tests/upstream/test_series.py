"""The series on the files that it touches: it applies, in every commit, without fuzz, and stays within its budget."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from upstream import build, commit, edit, tree, wheel


@pytest.fixture(scope="module")
def all_commits():
    return {name: commit.load(name) for name in commit.ALL}


def test_the_release_is_formatted_as_the_series_is(release, touched, tmp_path):
    release.lay_out(tmp_path, touched)
    tree.ruff(tmp_path, *tree.FORMAT, "--check", ".")


def test_patches_apply_to_a_fresh_copy_and_give_the_same_tree(built, tmp_path):
    folder, _ = built
    tree.git(folder, "format-patch", "--quiet", *build.PATCH_FORMAT, "-o", str(tmp_path / "patches"), tree.RELEASED)
    patches = sorted((tmp_path / "patches").glob("*.patch"))
    assert len(patches) == sum(len(commit.load(name)) for name in commit.ALL)
    build.apply_fresh(folder, tmp_path / "fresh", patches)


def test_the_series_is_small(built):
    folder, spans = built
    first, last = spans[commit.BLOCKS]
    tree.git(folder, "checkout", "--quiet", last)
    changed = build.changed_lines(folder, first)
    tree.git(folder, "checkout", "--quiet", "main")
    assert 0 < changed <= build.BUDGET


def test_index_kernels_compile_for_cuda(built, tmp_path):
    """Triton's compiler refuses what its interpreter lets through."""
    environ = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_MOCK_PTX_VERSION": "no ptxas needed",
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    kernels = built[0] / tree.source_path("sglang.kernels.ops.attention.dcp_kernels")
    script = Path(__file__).with_name("compile_series.py")
    done = subprocess.run(
        [sys.executable, str(script), str(kernels)], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 6


def test_messages_are_those_of_a_pull_request(all_commits):
    for commits in all_commits.values():
        for one in commits:
            assert len(one.subject) <= 72, one.subject
            assert one.message, one.subject
            assert all(len(line) <= 72 for line in one.message.splitlines()), one.subject


def test_a_second_start_gives_the_release_back(release, touched, tmp_path, all_commits):
    folder = tmp_path / "tree"
    tree.start(folder, release, touched)
    tree.add(folder, all_commits[commit.BLOCKS][0])
    tree.start(folder, release, touched)
    assert tree.git(folder, "rev-parse", "HEAD") == tree.git(folder, "rev-parse", tree.RELEASED)
    assert not (folder / "test").exists()


class TestAdd:
    """A commit that does not fit is refused, and says why."""

    @pytest.fixture
    def start(self, tmp_path):
        def start(source, **files):
            digest = base64.urlsafe_b64encode(hashlib.sha256(source.encode()).digest()).rstrip(b"=").decode()
            release = wheel.Release("0", "here", {"sglang/a.py": digest}, lambda path: source.encode())
            tree.start(tmp_path / "tree", release)
            for name, text in files.items():
                (tmp_path / "files" / "test").mkdir(parents=True, exist_ok=True)
                (tmp_path / "files" / "test" / f"{name}.py").write_text(text)
            return tmp_path / "tree"

        return start

    def commit(self, tmp_path, *changes, scope="f", module="sglang.a"):
        edits = (edit.on(module, scope, *changes),) if changes else ()
        return commit.Commit("c", "Subject", "Body", edits, tmp_path / "files")

    def test_edits_are_formatted_and_committed(self, start, tmp_path):
        folder = start("def f():\n    return 1\n", t="x = 1\n")
        assert tree.add(folder, self.commit(tmp_path, edit.body("return   2"))) == ["python/sglang/a.py", "test/t.py"]
        assert (folder / "python/sglang/a.py").read_text() == "def f():\n    return 2\n"
        assert tree.git(folder, "log", "-1", "--format=%s|%b").strip() == "Subject|Body"
        assert build.changed_lines(folder, tree.RELEASED) == 2

    def test_a_module_that_is_gone(self, start, tmp_path):
        with pytest.raises(tree.TreeError, match=r"sglang\.b"):
            tree.add(start("x = 1\n"), self.commit(tmp_path, edit.append("y = 1"), scope="", module="sglang.b"))

    def test_a_file_that_is_there_already(self, start, tmp_path):
        folder = start("x = 1\n", t="x = 1\n")
        (folder / "test").mkdir()
        (folder / "test" / "t.py").write_text("")
        with pytest.raises(tree.TreeError, match=r"test/t\.py"):
            tree.add(folder, self.commit(tmp_path))

    def test_text_of_a_page_that_an_earlier_commit_adds(self, start, tmp_path):
        folder = start("x = 1\n")
        (tmp_path / "files" / "docs").mkdir(parents=True)
        (tmp_path / "files" / "docs" / "page.mdx").write_text("takes one\n")
        tree.add(folder, self.commit(tmp_path))
        change = commit.Commit("d", "S", "B", (), tmp_path / "none", (("docs/page.mdx", "takes one", "takes two"),))
        assert tree.add(folder, change) == ["docs/page.mdx"]
        assert (folder / "docs/page.mdx").read_text() == "takes two\n"
        with pytest.raises(tree.TreeError, match="expected 'takes one' once, got it 0 times"):
            tree.add(folder, change)

    def test_source_that_does_not_compile(self, start, tmp_path):
        folder = start("def f():\n    return 1\n")
        with pytest.raises(tree.TreeError, match="compile"):
            tree.add(folder, self.commit(tmp_path, edit.append("x = 1\nbreak")))

    def test_imports_out_of_order(self, start, tmp_path):
        folder = start("import a\nimport c\n\n\ndef f():\n    return a, c\n", t="import b\nimport a\n\nx = a, b\n")
        with pytest.raises(tree.TreeError, match="sorted imports"):
            tree.add(folder, self.commit(tmp_path))


class TestWheel:
    """Where the release comes from: an intact installation, or a wheel whose every file has its recorded hash."""

    def test_the_installation_holds_every_recorded_file(self, release):
        assert release.version == wheel.VERSION
        assert len(release.hashes) > 1000
        assert "sglang/srt/layers/dcp/layout.py" in release.hashes
        assert not [path for path in release.hashes if path.endswith(".pyc") or not path.startswith("sglang/")]

    def test_another_version_is_not_installed(self):
        assert wheel.installed("0.0.1") is None

    @pytest.fixture
    def wheel_file(self, tmp_path):
        def write(content):
            digest = base64.urlsafe_b64encode(hashlib.sha256(b"x = 1\n").digest()).rstrip(b"=").decode()
            record = f"sglang/a.py,sha256={digest},6\nsglang-9.dist-info/RECORD,,\n../bin/x,sha256=1,1\n"
            file = tmp_path / "sglang-9-py3-none-any.whl"
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("sglang/a.py", content)
                archive.writestr("sglang-9.dist-info/RECORD", record)
            return file

        return write

    def test_a_wheel_is_laid_out_below_python(self, wheel_file, tmp_path):
        found = wheel.find(wheel=wheel_file(b"x = 1\n"))
        found.lay_out(tmp_path / "tree")
        assert found.version == "9"
        assert (tmp_path / "tree/python/sglang/a.py").read_bytes() == b"x = 1\n"

    def test_a_changed_file_is_refused(self, wheel_file, tmp_path):
        with pytest.raises(wheel.WheelError, match=r"sglang/a\.py"):
            wheel.from_wheel(wheel_file(b"x = 2\n")).lay_out(tmp_path / "tree")

    def test_a_file_that_is_not_there(self, wheel_file):
        with pytest.raises(wheel.WheelError, match="got none"):
            wheel.from_wheel(wheel_file(b"x = 1\n")).read("sglang/b.py")
