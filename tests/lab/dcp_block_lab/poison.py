"""The stand-in for FlashInfer's paged wrapper leaves requests without KV undefined, as real kernels may: as NaN."""

from __future__ import annotations


def install() -> None:
    import torch

    from sglang_dcp_block.cpu.shims.flashinfer_mla import PagedMla

    run = PagedMla.run

    def poisoned(self, *args, **kwargs):
        result = run(self, *args, **kwargs)
        if isinstance(result, tuple):  # decode over a rank's share
            for queries, keys in zip(self._queries, self._keys, strict=True):
                if keys.start == keys.stop:
                    for tensor in result:
                        tensor[queries] = torch.nan
        return result

    PagedMla.run = poisoned
