"""The Dockerfile: its base is the pinned SGLang, and what it copies builds the whole package.  No image is built here."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

from pages import ROOT
from sglang_dcp_block.patches import fingerprint

FILE = ROOT / "docker" / "Dockerfile"
DOCKERFILE = FILE.read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGE = ROOT / "python" / "sglang_dcp_block"


def copied() -> dict[str, str]:
    """What the Dockerfile copies: path in the checkout -> folder or path in the image."""
    lines = re.findall(r"^COPY (.*) (\S+)$", DOCKERFILE, re.MULTILINE)
    return {source: target for sources, target in lines for source in sources.split()}


def test_the_base_is_the_pinned_sglang() -> None:
    (version,) = re.findall(r"^ARG SGLANG_IMAGE=lmsysorg/sglang:v(\S+)$", DOCKERFILE, re.MULTILINE)
    assert PROJECT["optional-dependencies"]["server"] == [f"sglang=={version}"]
    assert version in fingerprint.known()


def test_nothing_that_is_copied_is_ignored() -> None:
    """The file beside it leaves all out, and takes back what is copied."""
    lines = FILE.with_name("Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """Built from what is copied, and from nothing else."""
    image, folder = tmp_path_factory.mktemp("image"), tmp_path_factory.mktemp("wheel")
    for source, target in copied().items():
        place = image / target.strip("/")
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, place)
    (root,) = {file.parent for file in image.rglob("pyproject.toml")}
    assert f" /{root.relative_to(image)} " in DOCKERFILE, "pip installs another folder"
    flags = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    child = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *flags, str(root)], capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stdout + child.stderr
    (file,) = folder.iterdir()
    return zipfile.Path(file)


def test_the_package_is_whole(wheel: zipfile.Path) -> None:
    """Tables that modules read are in it, too."""
    here = {file.relative_to(PACKAGE.parent) for file in PACKAGE.rglob("*") if file.is_file()}
    want = {str(file) for file in here if "__pycache__" not in file.parts}
    got = {name for name in wheel.root.namelist() if name.startswith(f"{PACKAGE.name}/") and not name.endswith("/")}
    assert got == want


def test_its_entry_points_are_the_project_s(wheel: zipfile.Path) -> None:
    (info,) = (path for path in wheel.iterdir() if path.name.endswith(".dist-info"))
    points = configparser.ConfigParser(delimiters=["="])
    points.read_string((info / "entry_points.txt").read_text(encoding="utf-8"))
    assert dict(points["console_scripts"]) == PROJECT["scripts"]
    assert {name: dict(points[name]) for name in PROJECT["entry-points"]} == PROJECT["entry-points"]


def test_the_build_ends_by_running_the_command() -> None:
    assert re.search(r"^RUN .*&& sglang-dcp-block --version$", DOCKERFILE, re.MULTILINE)
