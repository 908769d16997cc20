"""Out of memory is told from other errors by type, and by text only where there is no type."""

from __future__ import annotations

import pytest
import torch

from autoprec.bench.memory import free_memory, is_out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: invalid configuration argument"), False),
        (RuntimeError("mat1 and mat2 must have the same dtype"), False),
        (ValueError("out of memory is only a phrase here"), False),
    ],
)
def test_errors_are_classified(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_freeing_survives_a_broken_device(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []

    def broken() -> None:
        freed.append("tried")
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    free_memory()
    assert freed == ["tried"]
