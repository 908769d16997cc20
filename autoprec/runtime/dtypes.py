"""The half type of each precision."""

from __future__ import annotations

import torch

from autoprec.policy import Precision

HALF_DTYPES: dict[Precision, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp16_pure": torch.float16,
    "bf16_pure": torch.bfloat16,
}
