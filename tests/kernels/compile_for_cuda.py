"""Compiles every kernel to PTX; run it as a script.  Needs no GPU, but a process without Triton's interpreter.

Prints one JSON object: {kernel and variant: its TTIR}.
"""

import hashlib
import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dcp_block.gpu_check import attention
from sglang_dcp_block.kernels import compact_indices, group_pages, kv_indices, long_runs, neutralise, slot_maps

CONSTANTS = {"P": 8, "B": 64, "TILE": 512}
HOPPER = GPUTarget("cuda", 90, 32)


def stop_at_ptx(*arguments: Any) -> tuple[str, str] | None:
    """Compiler hook: asked for its cache key without arguments, for changes of the stages with them."""
    if not arguments:
        return "ptx", hashlib.sha256(b"ptx").hexdigest()
    arguments[1]["cubin"] = lambda ptx, metadata: b""
    return None


def compile_to_ttir(kernel: Any, **types: str | int | None) -> str:
    """Compile one variant: a type for every run-time argument, a value for every constant."""
    constants = CONSTANTS | {name: value for name, value in types.items() if not isinstance(value, str)}
    signature = {name: types[name] if isinstance(types.get(name), str) else "constexpr" for name in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(kernel, signature, constants)
    # The PTX version, else asked of ptxas, which need not be installed.
    return str(triton.compile(source, target=HOPPER, options={"ptx_version": 84}).asm["ttir"])


def variants() -> dict[str, str]:
    """Each kernel in the types that the engine, and the launcher's contract, can give it."""
    done = {}
    for index in ("i32", "i64"):
        for to_rows in (False, True):
            done[f"map_slots {index} to_rows {to_rows}"] = compile_to_ttir(
                slot_maps._map_slots_kernel,
                TO_ROWS=to_rows,
                slots_ptr=f"*{index}",
                out_ptr=f"*{index}",
                num_slots="i32",
                slots_stride="i32",
                out_stride="i32",
            )
        done[f"neutralise_empty {index}"] = compile_to_ttir(
            neutralise._neutralise_kernel,
            out_ptr="*bf16",
            lse_ptr="*fp32",
            kv_indptr_ptr=f"*{index}",
            row_size="i32",
            heads="i32",
            out_stride="i32",
            lse_stride="i32",
            lse_head_stride="i32",
        )
        done[f"compact_kv_indices {index}"] = compile_to_ttir(
            compact_indices._compact_kv_indices_kernel,
            kv_indices_ptr=f"*{index}",
            kv_indptr_ptr="*i32",
            local_lens_ptr=f"*{index}",
            local_indptr_ptr=f"*{index}",
            out_ptr=f"*{index}",
            RANK=3,
        )
        done[f"group_pages {index}"] = compile_to_ttir(
            group_pages._group_pages_kernel,
            free_pages_ptr="*i64",
            prefix_lens_ptr=f"*{index}",
            seq_lens_ptr=f"*{index}",
            out_ptr="*i64",
            num_free_pages="i32",
            PAGE_SIZE=64,
            REQUESTS=32,
        )
        for starts in (None, "*i32", "*i64"):
            done[f"build_kv_indices {index} starts {starts}"] = compile_to_ttir(
                kv_indices._build_kv_indices_kernel,
                req_to_token_ptr="*i32",
                req_pool_indices_ptr=f"*{index}",
                local_lens_ptr=f"*{index}",
                kv_indptr_ptr=f"*{index}",
                starts_ptr=starts,
                out_ptr="*i64",
                req_to_token_stride="i32",
                RANK=3,
            )
    done["long_runs_first"] = compile_to_ttir(
        long_runs._long_runs_first_kernel,
        pages_ptr="*i64",
        out_ptr="*i64",
        num_pages="i32",
        first_step="i32",
        TILE=long_runs.TILE,
    )
    done["gpu_check decode"] = compile_to_ttir(
        attention._decode_kernel,
        q_ptr="*fp32",
        pool_ptr="*fp32",
        rows_ptr="*i64",
        indptr_ptr="*i32",
        out_ptr="*fp32",
        lse_ptr="*fp32",
        scale="fp32",
        D=128,
        DV=64,
        TILE=64,
    )
    done["gpu_check merge"] = compile_to_ttir(
        attention._merge_kernel, outs_ptr="*fp32", lses_ptr="*fp32", merged_ptr="*fp32", num_states="i32", DV=64
    )
    return done


if __name__ == "__main__":
    triton.knobs.runtime.add_stages_inspection_hook = stop_at_ptx
    print(json.dumps(variants()))
