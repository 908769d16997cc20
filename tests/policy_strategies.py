"""Policies with every field set to anything that is allowed, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from autoprec.policy import (
    EXECUTIONS,
    PRECISIONS,
    Backend,
    Batch,
    Evidence,
    Figures,
    Fingerprint,
    LayerSetting,
    Loader,
    LossScale,
    Padding,
    Policy,
    Reason,
)

words = st.text(max_size=12)
positive = st.floats(min_value=1e-300, allow_infinity=False, allow_nan=False)
counts = st.integers(1, 10**9)
reasons = st.builds(
    Reason, kind=st.sampled_from(["range", "sensitivity", "divergence", "speed", "cast_cost", "pinned"]), text=words
)
settings = st.builds(LayerSetting, precision=st.sampled_from(PRECISIONS), reason=st.none() | reasons)
scales = st.builds(
    LossScale,
    init=positive,
    growth_interval=counts,
    growth_factor=st.floats(1, allow_infinity=False, exclude_min=True),
    backoff_factor=st.floats(0, 1, exclude_min=True, exclude_max=True),
    floor=positive,
)
batches = st.builds(
    lambda micro, steps: Batch(effective=micro * steps, micro=micro, accumulation_steps=steps), counts, st.integers(1, 64)
)
backends = st.builds(
    Backend, tf32=st.booleans(), cudnn_benchmark=st.booleans(), channels_last=st.booleans(), fp16_accumulation=st.booleans()
)
loaders = st.builds(
    Loader,
    num_workers=st.none() | st.integers(0, 64),
    pin_memory=st.none() | st.booleans(),
    prefetch_factor=st.none() | st.integers(1, 9),
)
origins = st.sampled_from(["measured", "predicted"])
any_gap = st.none() | st.floats(allow_nan=False, allow_infinity=False)
figures = st.builds(
    Figures,
    name=words,
    samples_per_s=st.none() | positive,
    peak_bytes=st.none() | st.integers(0, 2**40),
    loss_gap=any_gap,
    speed_origin=origins,
)
evidences = st.builds(
    Evidence,
    run=words,
    verdict=st.sampled_from(["passed", "rejected", "inconclusive", "unverified"]),
    speed_origin=origins,
    loss_gap=any_gap,
    tolerance=st.none() | positive,
    speedup_vs_fp32=st.none() | positive,
    speedup_vs_stock_amp=st.none() | positive,
    speedup_low=st.none() | positive,
    speedup_high=st.none() | positive,
    arms=st.lists(figures, max_size=3).map(tuple),
    note=words,
)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any policy at all, every field drawn."""
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5, unique=True))
    made_for = Fingerprint.of(
        {name: draw(words) for name in names},
        idle=tuple(draw(st.lists(words, max_size=2, unique=True))),
        device=draw(words),
        capability=draw(st.none() | words),
        torch_version=draw(words),
        workload_sha256=draw(words),
    )
    some = st.lists(st.sampled_from(names), unique=True)
    return Policy(
        default=draw(st.sampled_from(PRECISIONS)),
        layers={name: draw(settings) for name in draw(some)},
        loss_scale=draw(scales),
        batch=draw(batches),
        padding=Padding(layers={name: draw(counts) for name in draw(some)}, data_axis_multiple=draw(st.none() | counts)),
        outputs=draw(st.sampled_from(["fp32", "computed"])),
        weights=draw(st.sampled_from(["fp32", "half_with_masters"])),
        backend=draw(backends),
        execution=draw(st.sampled_from(EXECUTIONS)),
        loader=draw(loaders),
        fingerprint=made_for,
        evidence=draw(st.none() | evidences),
    )
