"""``torch`` as a module of SGLang sees it that says ``device="cuda"``, ``pin_memory=True`` or ``torch.cuda.Event``.

One module's global ``torch`` is given this object; everything else goes to the real torch.
"""

from __future__ import annotations

from typing import Any

import torch


def _on_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """Drop pinning and turn a CUDA device into the CPU; other devices stay."""
    arguments.pop("pin_memory", None)
    if str(arguments.get("device", "")).startswith("cuda"):
        arguments["device"] = "cpu"
    return arguments


class ReadyEvent:
    """A CUDA event of work that is done when the call returns, as all work on CPUs is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class CudaOnCpu:
    """``torch.cuda`` with events that are always ready and no streams."""

    Event = ReadyEvent

    @staticmethod
    def current_stream(device: Any = None) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class TorchOnCpu:
    """``torch``, but allocations asked for on CUDA or in pinned memory are plain CPU tensors."""

    cuda = CudaOnCpu()

    @staticmethod
    def empty(*size: Any, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **_on_cpu(options))

    @staticmethod
    def zeros(*size: Any, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **_on_cpu(options))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
