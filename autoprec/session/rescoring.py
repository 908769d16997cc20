"""Looks at the layers once more with the fastest plans around them: what a layer is handed depends on its neighbours' precision.

The profile scores a layer with all others in its own precision. A plan mixes them: a norm that answers in float32 under autocast
answers in fp16 where it is pure, and the square that its reader takes then overflows. One pass with a plan active shows every such
layer at once, however many there are, where a repair would find them window by window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autoprec.errors import WorkerError
from autoprec.policy import Precision
from autoprec.records import LayerProfile, Profile, Risk
from autoprec.session.context import Context
from autoprec.tune.assignment import Assignment, exceptions_of

# A layer counts as hurt by its neighbours from this harm on, where it also grew this many times. Own choice: an error of 3% of the
# layer's output, squared; rounding in half precision makes 1e-5 (bf16) or 1e-7 (fp16) and differs by a small factor.
HURT, TIMES = 1e-3, 4.0


def rescored(context: Context, profile: Profile, plans: Mapping[Precision, Assignment]) -> Profile:
    """The profile with what the fastest plan of each compute type shows; the same object where that is nothing new."""
    layers = {layer.layer: layer for layer in profile.layers}
    for dtype, plan in plans.items():
        if dtype == "fp32":
            continue
        settings = {"default": plan.default, "layers": exceptions_of(plan.precisions, plan.default)}
        policy = context.plain_fp32().model_copy(update=settings)
        try:
            found = context.bench.rescore(policy)
        except WorkerError as error:
            context.progress.found(f"profile: the fastest {dtype} plan ended the worker when it was looked at. {error.message}")
            continue
        for name, harm in found.items():
            layers[name] = _with(layers[name], plan.precisions[name], harm)
    changed = [layer.layer or "(root)" for layer in profile.layers if layers[layer.layer] is not layer]
    if not changed:
        return profile
    context.progress.found(f"profile: beside the neighbours of the fastest plan {', '.join(changed)} would suffer; planned anew")
    return profile.model_copy(update={"layers": tuple(layers[layer.layer] for layer in profile.layers)})


def _with(layer: LayerProfile, precision: Precision, harm: float) -> LayerProfile:
    """The layer with a harm seen in a plan: a risk that pins it where its results were not finite."""
    if math.isinf(harm):
        text = f"its own results are not finite in {precision} beside the neighbours of the fastest plan"
        risk = Risk(precision=precision, kind="range", hard=True, text=text)
        return layer.model_copy(update={"risks": (*layer.risks, risk)})
    known = layer.sensitivity.get(precision, 0.0)
    if harm < HURT or harm < TIMES * known:
        return layer
    return layer.model_copy(update={"sensitivity": {**layer.sensitivity, precision: harm}})
