"""Out of memory: told by type where torch has one, and freed afterwards."""

from __future__ import annotations

import contextlib
import gc
import re

import torch

# Texts of libraries that report a lack of memory without a type of its own.
# Source: cuBLAS and cuDNN status names; torch's DefaultCPUAllocator.
_TEXTS = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|can't allocate memory|not enough memory", re.IGNORECASE
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the device or the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_TEXTS.search(str(error)))


def free_memory() -> None:
    """Hands unused memory back. Call it outside the ``except`` block: inside, the traceback still holds the tensors."""
    gc.collect()
    # Does nothing where CUDA has not been started. After a CUDA error every call raises, and there is nothing left to free.
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()
