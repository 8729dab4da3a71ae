"""A git tree of upstream's layout, and a commit of a series made in it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from upstream.commit import Commit
from upstream.edit import apply
from upstream.wheel import Release

RELEASED = "released"  # the tag of the release's own commit

# Upstream formats with ruff at its default width; 0.5.23 as released is already so, which a test checks.
FORMAT = ("format", "--isolated", "--quiet", "--line-length", "88")
SORT = (
    "check",
    "--isolated",
    "--quiet",
    "--line-length",
    "88",
    "--select",
    "I",
    "--config",
    'lint.isort.known-first-party = ["sglang"]',
)
IDENTITY = {
    "GIT_AUTHOR_NAME": "sglang-dcp-block",
    "GIT_AUTHOR_EMAIL": "sglang-dcp-block@users.noreply.github.com",
    "GIT_COMMITTER_NAME": "sglang-dcp-block",
    "GIT_COMMITTER_EMAIL": "sglang-dcp-block@users.noreply.github.com",
    # The same series twice is the same bytes.
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


class TreeError(Exception):
    """A commit does not fit the tree."""


def source_path(module: str) -> str:
    """Where a module lies in upstream's repository."""
    return f"python/{module.replace('.', '/')}.py"


def touched(commits: Iterable[Commit]) -> list[str]:
    """Modules that commits edit, dotted."""
    return sorted({edit.module for commit in commits for edit in commit.edits})


def start(folder: Path, release: Release, paths: Iterable[str] | None = None) -> None:
    """Make ``folder`` a repository whose only commit is the release, or just these files of it.

    One that holds this release already is put back to that commit: most of the time goes into laying out.
    """
    chosen = sorted(release.hashes if paths is None else paths)
    digest = hashlib.sha256("".join(f"{path} {release.hashes[path]}\n" for path in chosen).encode()).hexdigest()
    mark = folder / ".git" / "release.sha256"
    if mark.is_file() and mark.read_text() == digest:
        git(folder, "reset", "--quiet", "--hard", RELEASED)
        git(folder, "clean", "--quiet", "-d", "--force", "-x")
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    release.lay_out(folder, chosen)
    git(folder, "init", "--quiet", "--initial-branch=main")
    for name, value in {"core.autocrlf": "false", "core.compression": "0", "gc.auto": "0"}.items():
        git(folder, "config", name, value)
    git(folder, "add", "--all", "--force", "python")
    git(folder, "commit", "--quiet", "--no-verify", "-m", f"SGLang {release.version} as released")
    git(folder, "tag", RELEASED)
    mark.write_text(digest)


def add(folder: Path, commit: Commit) -> list[str]:
    """Make ``commit`` on top of what is in ``folder``; returns the paths it touched.

    Raises:
        AnchorError: an edit does not fit the source.
        TreeError: a page has not the text that is changed, a new file is there already, a file does not compile, or
            its imports are no longer in order.
    """
    edited: dict[Path, str] = {}
    for module, edits in commit.edits_by_module().items():
        path = folder / source_path(module)
        if not path.is_file():
            raise TreeError(f"{commit.name}: expected a module {module}, got none in {folder}")
        edited[path] = apply(path.read_text(), *edits)
    sorted_before = {path for path in edited if _sorted(path, folder)}
    for name, old, text in commit.pages:
        page = (folder / name).read_text() if (folder / name).is_file() else ""
        if page.count(old) != 1:
            raise TreeError(f"{commit.name}, {name}: expected {old!r} once, got it {page.count(old)} times")
        edited[folder / name] = page.replace(old, text)
    for path, source in edited.items():
        path.write_text(source)
    new = [folder / path for path in commit.new_files()]
    for path in new:
        if path.exists():
            raise TreeError(f"{commit.name}: expected to add {path.relative_to(folder)}, which is there already")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(commit.files / path.relative_to(folder), path)
    python = [path for path in [*edited, *new] if path.suffix == ".py"]
    if python:
        ruff(folder, *FORMAT, *map(str, python))
    for path in python:
        _compile(path, commit)
        if (path in sorted_before or path in new) and not _sorted(path, folder):
            raise TreeError(f"{commit.name}, {path.relative_to(folder)}: expected sorted imports; run ruff --select I")
    git(folder, "add", "--all", "--", *(str(path) for path in [*edited, *new]))
    message = f"{commit.subject}\n\n{commit.message}\n"
    git(folder, "commit", "--quiet", "--no-verify", "-F", "-", stdin=message)
    return sorted(str(path.relative_to(folder)) for path in [*edited, *new])


def git(folder: Path, *arguments: str, stdin: str | None = None) -> str:
    """Run git in ``folder``, the same on every machine; returns what it printed.

    Raises:
        TreeError: git failed; with its own words.
    """
    done = subprocess.run(
        ["git", *arguments], cwd=folder, input=stdin, capture_output=True, text=True, check=False, env=_environment()
    )
    if done.returncode:
        raise TreeError(f"git {' '.join(arguments[:2])} in {folder} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def clone(source: Path, folder: Path, revision: str) -> None:
    """A copy of the repository ``source`` in ``folder``, with ``revision`` checked out; it shares the objects."""
    shutil.rmtree(folder, ignore_errors=True)
    git(source, "clone", "--quiet", "--shared", "--no-checkout", str(source), str(folder))
    git(folder, "checkout", "--quiet", revision)


def ruff(folder: Path, *arguments: str) -> None:
    """Run this environment's ruff in ``folder``.

    Raises:
        TreeError: it found something, or failed.
    """
    done = _ruff(folder, arguments)
    if done.returncode:
        raise TreeError(f"ruff {arguments[0]} failed:\n{done.stdout}{done.stderr}")


def _ruff(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def _sorted(path: Path, folder: Path) -> bool:
    return _ruff(folder, (*SORT, str(path))).returncode == 0


def _compile(path: Path, commit: Commit) -> None:
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise TreeError(f"{commit.name}: {path} does not compile: {error}") from error


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, **IDENTITY}
