"""What a training job imports: a policy applied to a model, and the pieces around the loop.

Needs torch and the policy's parser only; neither Optuna nor anything of the search.
"""

from __future__ import annotations

from autoprec.runtime.apply import AppliedPolicy, apply_policy
from autoprec.runtime.batch_padding import pad_batch, pad_collate
from autoprec.runtime.classes import remove_policy
from autoprec.runtime.layers import layer_signature, named_layers, strip_prefixes
from autoprec.runtime.scaler import PolicyScaler
from autoprec.runtime.tree import map_tensors

__all__ = [
    "AppliedPolicy",
    "PolicyScaler",
    "apply_policy",
    "layer_signature",
    "map_tensors",
    "named_layers",
    "pad_batch",
    "pad_collate",
    "remove_policy",
    "strip_prefixes",
]
