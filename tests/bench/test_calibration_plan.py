"""The jobs of a calibration: within capacity, in a useful order, held-out ones separate."""

from __future__ import annotations

import pytest
from calibration_bench import (
    CAPACITY,
    LEVELS,
)

from counterpoint.bench.calibration_plan import (
    HELD_OUT_PAIRS,
    HELD_OUT_SOLO,
    DeviceCapacity,
    held_out_jobs,
    plan_jobs,
)


def test_small_passes_are_measured_at_padded_sizes():
    buckets = (48, 128, 640)
    alone = [
        job
        for job in plan_jobs(132, LEVELS, CAPACITY, buckets)
        if len(job.prompts) == 1 and not job.contexts and not sum(p.reused for p in job.prompts)
    ]
    small = {job.prompts[0].tokens for job in alone if job.prompts[0].tokens <= 640}
    assert small == set(buckets)
    assert max(job.prompts[0].tokens for job in alone) == 8192


def test_jobs_fit_the_capacity():
    small = DeviceCapacity(context=1000, tokens=20_000, batch=24, rows=600)
    for job in [*plan_jobs(2, (1,), small), *held_out_jobs(2, (1,), small, 512)]:
        assert small.fits(job)
        assert len(job.contexts) <= 24
    assert any(job.prompts and job.contexts and not job.fused for job in plan_jobs(2, (1,), small))


def test_pairs_and_solo_jobs_progress_alike():
    """Of pairs and of steps alone, about the same share of the plan is done at any time."""
    jobs = plan_jobs(132, LEVELS, CAPACITY, (64, 128, 256, 512))
    both = [bool(job.prompts and job.contexts and not job.fused) for job in jobs]
    for share in (0.25, 0.5, 0.75):
        done = int(share * len(jobs))
        assert sum(both[:done]) / sum(both) == pytest.approx(share, abs=0.15)


def test_the_held_out_are_others_than_the_plan():
    plan = set(plan_jobs(132, LEVELS, CAPACITY))
    held_out = held_out_jobs(132, LEVELS, CAPACITY, 8192)
    assert len(held_out) == HELD_OUT_SOLO + HELD_OUT_PAIRS
    assert not {job._replace(held_out=False) for job in held_out} & plan
    assert held_out == held_out_jobs(132, LEVELS, CAPACITY, 8192)
