"""Kernels pass Triton's real compiler, which refuses what its interpreter lets through, and address with 64 bits."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Arrays of one entry a request; every other pointer may have to reach behind 2**31 entries.
SHORT = re.compile(r"(local_lens|prefix_lens|seq_lens|req_pool_indices|\w*indptr|starts)_ptr")


@pytest.fixture(scope="module")
def ttir_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "TRITON_MOCK_PTX_VERSION": "no ptxas needed",
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    script = Path(__file__).with_name("compile_for_cuda.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_variant_compiles(ttir_of: dict[str, str]) -> None:
    assert len(ttir_of) == 19
    assert all("tt.store" in ttir for ttir in ttir_of.values())


def test_offsets_have_64_bits(ttir_of: dict[str, str]) -> None:
    for variant, ttir in ttir_of.items():
        offsets = re.findall(r"tt\.addptr %(\w+), %\w+ .*?: .*?, (?:tensor<\d+x)?(i\d+)", ttir)
        assert offsets, variant
        for pointer, bits in offsets:
            assert bits == "i64" or SHORT.fullmatch(pointer), (variant, pointer)
