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
VERSION_FILE = "sglang/_version.py"  # made by the build, not a source: this is another build


class ForkError(Exception):
    """The tree is no release with the series on top."""


def build(folder: Path, release: wheel.Release, number: str, out: Path) -> Path:
    """Write the wheel of the tree in ``folder`` and return its path.

    Files and metadata are the release's with the series on top, but for the version, which gets ``+dcpblock<number>``:
    pip takes it for 0.5.23 and newer, and pip, ``sglang.__version__`` and ``/server_info`` say what it is.

    Args:
        folder: a repository as :func:`upstream.tree.start` makes it; files that git tracks go in.
        release: where metadata and compatibility tags come from.
        number: this project's version, of digits and dots.
        out: the folder for the wheel.
    Raises:
        ForkError: the number cannot be part of a version, or the release does not say its own where expected.
    """
    if not re.fullmatch(r"\d+(\.\d+)*", number):
        raise ForkError(f"number: expected digits and dots, got {number!r}")
    version = f"{release.version}+{LABEL}{number}"
    tracked = subprocess.run(["git", "ls-files", "-z", "python/sglang"], cwd=folder, capture_output=True, check=True)
    paths = sorted(tracked.stdout.decode().strip("\0").split("\0"))
    info = f"{wheel.PACKAGE}-{version}.dist-info"
    metadata = release.metadata()
    metadata["METADATA"] = _replaced(
        metadata["METADATA"], rb"(?m)^(Version: ).*$", rb"\g<1>" + version.encode(), "METADATA: expected a Version line"
    )
    out.mkdir(parents=True, exist_ok=True)
    target = out / f"{wheel.PACKAGE}-{version}-{_tags(metadata['WHEEL'])}.whl"
    record: list[tuple[str, str, str]] = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:

        def add(name: str, data: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append((name, f"sha256={digest}", str(len(data))))

        for path in paths:
            name, data = path.removeprefix("python/"), (folder / path).read_bytes()
            add(name, _says(version, data) if name == VERSION_FILE else data)
        for name, data in metadata.items():
            add(f"{info}/{name}", data)
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([*record, (f"{info}/RECORD", "", "")])
        archive.writestr(f"{info}/RECORD", lines.getvalue())
    return target


def _says(version: str, source: bytes) -> bytes:
    """The version file with another version."""
    release, _, label = version.partition("+")
    numbers = ", ".join(release.split("."))
    changed = _replaced(
        source,
        rb"(?m)^(__version__ = version = )'" + re.escape(release).encode() + rb"'$",
        rb"\g<1>'" + version.encode() + rb"'",
        f"{VERSION_FILE}: expected one version {release}",
    )
    return _replaced(
        changed,
        rb"(?m)^(__version_tuple__ = version_tuple = )\(" + re.escape(numbers).encode() + rb"\)$",
        rb"\g<1>(" + f"{numbers}, {label!r}".encode() + rb")",
        f"{VERSION_FILE}: expected one version tuple ({numbers})",
    )


def _replaced(text: bytes, pattern: bytes, new: bytes, expected: str) -> bytes:
    changed, times = re.subn(pattern, new, text)
    if times != 1:
        raise ForkError(f"{expected}, got {times}")
    return changed


def _tags(wheel_file: bytes) -> str:
    tags = re.findall(rb"(?m)^Tag: (\S+)", wheel_file)
    if not tags:
        raise ForkError("WHEEL: expected a Tag line, got none")
    return str(tags[0].decode())
