"""The pinned SGLang release, laid out as upstream's repository has it: the package below ``python/``.

The files come from the environment's own installation where every one of them has the hash that its wheel recorded, and
from the package registry otherwise; either way each file is checked against the wheel's RECORD.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

VERSION = "0.5.23"
PACKAGE = "sglang"
CACHE = Path.home() / ".cache" / "sglang-dcp-block" / "wheels"


class WheelError(Exception):
    """The release cannot be had, or is not what its wheel says."""


@dataclass(frozen=True)
class Release:
    """The files of a release, each checked when it is read."""

    version: str
    origin: str  # where they come from, for people
    hashes: dict[str, str]  # path in site-packages -> urlsafe base64 of its SHA-256, as in RECORD
    read_bytes: Callable[[str], bytes]
    info: dict[str, str] = field(default_factory=dict)  # the same for the metadata, by path below the .dist-info folder

    def read(self, path: str) -> bytes:
        """One file, by its path in site-packages (``sglang/...``).

        Raises:
            WheelError: the release has no such file, or its content is not the recorded one.
        """
        if path not in self.hashes:
            raise WheelError(f"{self.origin}: expected a file {path}, got none")
        return self._checked(path, self.hashes[path])

    def metadata(self) -> dict[str, bytes]:
        """The files of the wheel's ``.dist-info`` folder, but for RECORD."""
        folder = f"{PACKAGE}-{self.version}.dist-info"
        return {name: self._checked(f"{folder}/{name}", digest) for name, digest in self.info.items()}

    def _checked(self, path: str, digest: str) -> bytes:
        data = self.read_bytes(path)
        got = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if got != digest:
            raise WheelError(f"{self.origin}, {path}: expected the recorded SHA-256 {digest}, got {got}")
        return data

    def lay_out(self, folder: Path, paths: Iterable[str] | None = None) -> None:
        """Write files (default: all) below ``folder/python``."""
        for path in self.hashes if paths is None else paths:
            target = folder / "python" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.read(path))


def find(version: str = VERSION, *, wheel: Path | None = None) -> Release:
    """The release: a given wheel file, or the installed one if it is intact, or a download.

    Raises:
        WheelError: none of them can be had.
    """
    if wheel is not None:
        return from_wheel(wheel)
    return installed(version) or from_wheel(download(version))


def installed(version: str) -> Release | None:
    """The installed release, if it is this version and every file has its recorded hash; None otherwise."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != version:
        return None
    record = distribution.read_text("RECORD")
    if record is None:
        return None
    root = Path(str(distribution.locate_file("")))
    package, info = _hashes(record, version)
    release = Release(version, f"installed {PACKAGE} {version}", package, lambda p: (root / p).read_bytes(), info)
    try:
        for path in release.hashes:
            release.read(path)
    except (WheelError, OSError):
        return None
    return release


def from_wheel(file: Path) -> Release:
    """The release in a wheel file."""
    archive = zipfile.ZipFile(file)
    records = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
    if len(records) != 1 or not records[0].startswith(f"{PACKAGE}-"):
        raise WheelError(f"{file}: expected one RECORD of {PACKAGE}, got {records}")
    version = records[0].removeprefix(f"{PACKAGE}-").removesuffix(".dist-info/RECORD")
    package, info = _hashes(archive.read(records[0]).decode(), version)
    return Release(version, file.name, package, archive.read, info)


def download(version: str, cache: Path = CACHE) -> Path:
    """The wheel file from the configured package registry, kept in ``cache``.

    Raises:
        WheelError: pip could not fetch exactly one wheel of this version.
    """
    folder = cache / version
    if not (found := _wheels(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        command = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
        done = subprocess.run(
            [sys.executable, "-m", *command, f"{PACKAGE}=={version}"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise WheelError(f"pip could not download {PACKAGE}=={version}:\n{done.stderr.strip()}")
        found = _wheels(folder)
    if len(found) != 1:
        raise WheelError(f"{folder}: expected one wheel of {PACKAGE}, got {[file.name for file in found]}")
    return found[0]


def _wheels(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{PACKAGE}-*.whl"))


# What an installer adds or changes itself.
_INSTALLERS = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")


def _hashes(record: str, version: str) -> tuple[dict[str, str], dict[str, str]]:
    """Hashes of the package's files and of its metadata: what installers add carries no hash or lies elsewhere."""
    package, info, folder = {}, {}, f"{PACKAGE}-{version}.dist-info/"
    for path, digest, _ in csv.reader(io.StringIO(record)):
        digest = digest.removeprefix("sha256=")
        if path.startswith(f"{PACKAGE}/") and digest and not path.endswith(".pyc"):
            package[path] = digest
        elif path.startswith(folder) and digest and path.removeprefix(folder) not in _INSTALLERS:
            info[path.removeprefix(folder)] = digest
    return package, info
