"""Compiles the series' index kernels to PTX: ``compile_series.py dcp_kernels.py``; needs no GPU, but no interpreter."""

import importlib.util
import sys
from pathlib import Path

import triton
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from compile_for_cuda import HOPPER, stop_at_ptx

CSR = {"local_kv_lens": "*i32", "local_kv_lens_cumsum": "*i32", "local_kv_indices": "*i32", "kv_indices": "*i32"}
TABLE = {"req_to_token_ptr": "*i32", "req_pool_indices_ptr": "*i64", "dcp_kernel_lens_ptr": "*i64", "kv_indptr": "*i32"}


def compile_one(kernel, types: dict[str, str], constants: dict[str, int | None]) -> None:
    """Compile a kernel with a type for each run-time argument and a value for each constant."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {name: value for name, value in constants.items() if name not in types})
    triton.compile(source, target=HOPPER, options={"ptx_version": 84})
    print(kernel.__name__, constants)


def main() -> None:
    spec = importlib.util.spec_from_file_location("patched_dcp_kernels", sys.argv[1])
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    triton.knobs.runtime.add_stages_inspection_hook = stop_at_ptx
    for size in (1, 64):
        for start in ({}, {"kv_start_idx": "*i32"}):
            compile_one(
                kernels.create_triton_kv_indices_for_dcp_triton,
                {**TABLE, **start, "kv_indices_ptr": "*i64"},
                {
                    "kv_start_idx": None,
                    "req_to_token_ptr_stride": 4096,
                    "dcp_size": 8,
                    "dcp_rank": 3,
                    "interleave_size": size,
                },
            )
        compile_one(
            kernels.update_kv_lens_and_indices,
            {**CSR, "kv_lens": "*i32", "kv_lens_cumsum": "*i32"},
            {"dcp_rank": 3, "dcp_world_size": 8, "BLOCK_SIZE": 128, "interleave_size": size},
        )


if __name__ == "__main__":
    main()
