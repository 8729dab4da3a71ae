"""``make fork``: the exported tree as a wheel, for people who would rather run a fork than a plugin."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import subprocess
import zipfile
from pathlib import Path

from upstream import wheel

LABEL = "dcpblock"


class ForkError(Exception):
    """The tree is no release with the series on top."""


def build(folder: Path, release: wheel.Release, number: str, out: Path) -> Path:
    """Write the wheel of the tree in ``folder`` and return its path.

    The metadata are the release's own, but for the version, which gets ``+dcpblock<number>``: pip takes it for 0.5.23
    and newer, and says what it is.

    Args:
        folder: a repository as :func:`upstream.tree.start` makes it; files that git tracks go in.
        release: where metadata and compatibility tags come from.
        number: this project's version, of digits and dots.
        out: the folder for the wheel.
    Raises:
        ForkError: the number cannot be part of a version.
    """
    if not re.fullmatch(r"\d+(\.\d+)*", number):
        raise ForkError(f"number: expected digits and dots, got {number!r}")
    version = f"{release.version}+{LABEL}{number}"
    tracked = subprocess.run(["git", "ls-files", "-z", "python/sglang"], cwd=folder, capture_output=True, check=True)
    paths = sorted(tracked.stdout.decode().strip("\0").split("\0"))
    info = f"{wheel.PACKAGE}-{version}.dist-info"
    metadata = release.metadata()
    metadata["METADATA"] = _with_version(metadata["METADATA"], version)
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{wheel.PACKAGE}-{version}-{_tags(metadata['WHEEL'])}.whl"
    record: list[tuple[str, str, str]] = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:

        def add(name: str, data: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append((name, f"sha256={digest}", str(len(data))))

        for path in paths:
            add(path.removeprefix("python/"), (folder / path).read_bytes())
        for name, data in metadata.items():
            add(f"{info}/{name}", data)
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([*record, (f"{info}/RECORD", "", "")])
        archive.writestr(f"{info}/RECORD", lines.getvalue())
    return target


def _with_version(metadata: bytes, version: str) -> bytes:
    changed, times = re.subn(rb"(?m)^Version: .*$", f"Version: {version}".encode(), metadata, count=1)
    if times != 1:
        raise ForkError("METADATA: expected a Version line, got none")
    return changed


def _tags(wheel_file: bytes) -> str:
    tags = re.findall(rb"(?m)^Tag: (\S+)", wheel_file)
    if not tags:
        raise ForkError("WHEEL: expected a Tag line, got none")
    return str(tags[0].decode())
