"""benchmarks/fit_model.py finds figures again that rows were made from, and the package's data file is what it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from sglang_dcp_block.made_tables import END, renew
from sglang_dcp_block.transfer_model import __main__ as pages
from sglang_dcp_block.transfer_model.links import fit_rows, fitted
from sglang_dcp_block.transfer_model.tables import TABLES, begin, marked
from sglang_dcp_block.transfer_model.times import seconds

ROOT = Path(__file__).parents[2]
HEADER = "way,layers,tokens,row_bytes,block,bytes,segments,p20_s,p50_s,p80_s"


@pytest.fixture(scope="module")
def fit_model():
    spec = importlib.util.spec_from_file_location("fit_model", ROOT / "benchmarks" / "fit_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_model"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def lines(segment=3e-5, byte=6e-10, gather=2e-10, noise=1.0):
    """A benchmark's CSV as the model would have it."""
    rows = []
    for layers in (8, 61):
        num_bytes = layers * 2048 * 1152
        for way, segments, packed in (("blocks of 64", 32, 0), ("token round-robin", 2048, 0), ("host pack", 1, 1)):
            time = segments * layers * segment + num_bytes * (byte + packed * gather)
            time *= noise if layers == 8 else 1 / noise
            rows.append(f"{way},{layers},16384,1152,64,{num_bytes},{segments * layers},0,{time!r},0")
        rows.append(f"memcpy,{layers},16384,1152,64,{num_bytes},0,0,0.001,0")
        rows.append(f"one segment,{layers},16,1152,64,2304,{layers},0,0.0005,0")
    return [HEADER, *rows]


def test_figures_are_found_again(fit_model):
    rows = fit_model.read(lines())
    assert {row.way for row in rows} == {"blocks of 64", "token round-robin", "host pack"}, "others are left out"
    found = fit_model.fit(rows)
    assert (found.segment_seconds, found.byte_seconds, found.gather_byte_seconds) == pytest.approx((3e-5, 6e-10, 2e-10))
    assert max(abs(found.error(row)) for row in rows) < 1e-9


def test_noise_is_shared_out(fit_model):
    rows = fit_model.read(lines(noise=1.2))
    found = fit_model.fit(rows)
    assert found.segment_seconds == pytest.approx(3e-5, rel=0.1)
    assert 0.1 < max(abs(found.error(row)) for row in rows) < 0.25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("way,layers\n", "missing: tokens, row_bytes, bytes, segments, p50_s"),
        ("\n".join(line for line in lines() if "pack" not in line), "expected rows that were packed"),
        ("\n".join(lines(gather=-1e-10)), "expected positive figures"),
    ],
)
def test_rows_that_tell_nothing(fit_model, tmp_path, capsys, text, message):
    (tmp_path / "t.csv").write_text(text)
    assert fit_model.main([str(tmp_path / "t.csv"), "--out", str(tmp_path / "out.json")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_what_it_writes_is_what_the_package_reads(fit_model, tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text("\n".join(lines()))
    assert fit_model.main([str(tmp_path / "t.csv"), "--out", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(written) == set(json.loads(fit_model.FITTED.read_text()))
    assert "fitted by benchmarks/fit_model.py to 6 rows of t.csv" in written["origin"]


def test_the_data_file_says_of_its_rows_what_the_model_says():
    for row in fit_rows():
        packings = int(row["way"] == "host pack")
        assert seconds(fitted(), row["segments"], row["bytes"], packings) == pytest.approx(row["modelled_s"], rel=2e-3)


class TestPage:
    def test_is_up_to_date(self):
        file = str(ROOT / "docs" / "transfer-model.md")
        assert pages.main(["--check", file]) == 0, f"run: {pages.PROGRAM} {file}"

    def test_is_said_to_be_out_of_date(self, tmp_path, capsys):
        page = "\n".join(f"{begin(name)}\nold\n{END}" for name in TABLES)
        (tmp_path / "page.md").write_text(page)
        assert pages.main(["--check", str(tmp_path / "page.md")]) == 1
        assert "is out of date" in capsys.readouterr().out
        assert pages.main([str(tmp_path / "page.md")]) == 0
        assert pages.main(["--check", str(tmp_path / "page.md")]) == 0
        assert "old" not in (tmp_path / "page.md").read_text()

    def test_without_a_marker(self, tmp_path, capsys):
        (tmp_path / "page.md").write_text("nothing")
        assert pages.main([str(tmp_path / "page.md")]) == 2
        assert "expected one '<!-- begin links" in capsys.readouterr().err

    def test_the_text_keeps_its_figures(self):
        """What the prose takes from the tables."""
        page = (ROOT / "docs" / "transfer-model.md").read_text(encoding="utf-8")
        assert renew(page, marked()) == page
        rdma = {row.split("|")[1].strip(): row.split("|") for row in TABLES["times of rdma-400"]() if "fresh" in row}
        tokens, packed, blocks = (float(rdma["131,072"][i].replace(",", "")) for i in (3, 4, 8))
        assert f"the factor is {tokens / packed:.0f}" in " ".join(page.split())
        assert f"by about {blocks / packed:.1f} over RDMA" in page
