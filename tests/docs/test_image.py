"""The Dockerfile: its base is the SGLang that is pinned, and what it copies is there.  It is not built here."""

from __future__ import annotations

import re
import tomllib

from pages import ROOT
from sglang_dcp_block.patches import fingerprint

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


def test_the_base_is_the_pinned_sglang() -> None:
    (version,) = re.findall(r"^ARG SGLANG_IMAGE=lmsysorg/sglang:v(\S+)$", DOCKERFILE, re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["server"] == [f"sglang=={version}"]
    assert version in fingerprint.known()


def test_what_is_copied_is_enough_to_build_the_package() -> None:
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"pyproject.toml", "python", project["readme"], *project["license-files"]} <= copied
