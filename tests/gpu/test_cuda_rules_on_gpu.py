"""The CPU's stand-in rules held against a CUDA device's own autocast: same types, about the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.bench.cuda_rules import cuda_autocast_rules

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch.cuda.is_available() is False"),
]

W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
IMAGE = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(3))
KERNEL = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(4))
CUBE = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(5))

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, W.to(x)),
    "matmul": lambda x: x @ W.to(x),
    "addmm": lambda x: torch.addmm(W.to(x)[:4], x, W.to(x)),
    "bmm": lambda x: torch.bmm(CUBE.to(x), CUBE.to(x).transpose(1, 2)),
    "einsum": lambda x: torch.einsum("bi,io->bo", x, W.to(x)),
    "conv2d": lambda x: F.conv2d(IMAGE.to(x), KERNEL.to(x)),
    "conv2d same": lambda x: F.conv2d(IMAGE.to(x), KERNEL.to(x), padding="same"),
    "conv_transpose2d": lambda x: F.conv_transpose2d(IMAGE.to(x), KERNEL.to(x)),
    "attention": lambda x: F.scaled_dot_product_attention(CUBE.to(x), CUBE.to(x), CUBE.to(x)),
    "prelu": lambda x: F.prelu(x, W.to(x)[0, :1]),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "exp": torch.exp,
    "log": lambda x: (x.abs() + 1).log(),
    "pow": lambda x: x**2,
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "cumsum": lambda x: x.cumsum(-1),
    "prod": lambda x: x.prod(-1),
    "norm": lambda x: x.norm(),
    "softplus": F.softplus,
    "gelu": F.gelu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "add": lambda x: x + 1,
    "cat": lambda x: torch.cat([x, x.float()]),
    "stack": lambda x: torch.stack([x, x]),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x, dim=-1),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "interpolate": lambda x: F.interpolate(IMAGE.to(x), scale_factor=2),
    "max_pool2d": lambda x: F.max_pool2d(IMAGE.to(x), 2),
    "reflection pad": lambda x: F.pad(IMAGE.to(x), (1, 1, 1, 1), mode="reflect"),
    "grid_sample": lambda x: F.grid_sample(IMAGE.to(x), torch.zeros(2, 3, 3, 2).to(x), align_corners=False),
    "std": lambda x: x.std(),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, None])
@pytest.mark.parametrize("name", OPS)
def test_the_stand_in_answers_in_the_type_and_about_the_numbers_of_the_device(
    name: str, given: torch.dtype | None, dtype: torch.dtype
) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(given or dtype)
    with torch.autocast("cuda", dtype=dtype):
        device = OPS[name](x.cuda())
    with cuda_autocast_rules(), torch.autocast("cpu", dtype=dtype):
        stand_in = OPS[name](x)
    assert stand_in.dtype == device.dtype
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 4e-3, "atol": 4e-3}
    torch.testing.assert_close(stand_in.float(), device.cpu().float(), **close)
