"""On a GPU only: model families and 16 bits against the reference, moving splits, device setup."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from cuda_reference import PROMPT, greedy_by_reference, reference_logits, tokens_of
from cuda_rig import GREEDY, HAS_GPU, LEVELS, TINY, VOCAB, make_parts, rig
from cuda_service import EngineService, random_requests

from counterpoint.config import Config, ConfigError
from counterpoint.core.policy import Multiplex, Serial
from counterpoint.spec import ModelSpec
from counterpoint.spec.source import ModelSource
from counterpoint.types import Abort, Lane, Role, Segment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")]

LLAMA = ModelSpec("wide", "llama", 3, 512, 8, 2, 128, 768, 512, 1024, eos_token_ids=(1,))
FAMILIES = {
    "llama": TINY,
    "llama, 3 query heads per KV head, head size 24": dataclasses.replace(
        TINY, heads=6, kv_heads=2, head_dim=24
    ),
    "mistral": dataclasses.replace(TINY, family="mistral", tied_embeddings=False),
    "qwen2": dataclasses.replace(TINY, family="qwen2", qkv_bias=True),
    "qwen3": dataclasses.replace(TINY, family="qwen3", qk_norm=True, head_dim=32),
}


# ---------------------------------------------------------------- families


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_family_equals_the_reference_in_float32(name: str):
    spec = FAMILIES[name]
    with rig(spec=spec) as r:
        r.open(0, PROMPT, GREEDY)
        got = tokens_of(r.generate(0, len(PROMPT), 10))
    assert got == greedy_by_reference(spec, PROMPT, 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spec",
    [LLAMA, dataclasses.replace(LLAMA, head_dim=64, heads=8, kv_heads=1), TINY],
    ids=["128", "64", "16"],
)
def test_16_bit_tokens_are_near_the_best_of_the_reference(dtype: torch.dtype, spec: ModelSpec):
    """Through FlashInfer and the kernel for few SMs where they support the shape."""
    prompt = [7 * n % VOCAB for n in range(1, 300)][: spec.max_context_tokens - 60]
    with rig(spec=spec, dtype=dtype, std=0.05) as r:
        r.open(0, prompt)
        got = tokens_of(r.generate(0, len(prompt), 24, units=LEVELS[0]))
    logits = reference_logits(spec, prompt + got, 0.05)[len(prompt) - 1 : -1, :VOCAB]
    chosen = logits.gather(1, torch.tensor(got)[:, None])[:, 0]
    assert ((logits.amax(1) - chosen) / logits.std(1)).max() < 0.25


# ---------------------------------------------------------------- stress


class MovingSplit(Multiplex):
    """Multiplex whose split changes every five decode steps."""

    def __init__(self, units: int, depth: int = 2) -> None:
        super().__init__(160, units, LEVELS[0], layer_group=1, depth=depth)
        self.turns = itertools.count()

    def next_batch(self, lane: Lane, state, now: float):
        if lane.role is Role.DECODE:
            self.split = LEVELS[next(self.turns) // 5 % len(LEVELS)]
        return super().next_batch(lane, state, now)


def test_tokens_survive_aborts_and_moving_splits():
    arrivals = random_requests(400, max_prompt_tokens=150)
    chance = random.Random(1)
    parts = make_parts(pages=200, slots=32)
    service = EngineService(parts, Serial(400, parts.units, depth=2), slots=32, max_pass_tokens=400)
    truth = service.run_requests(arrivals)
    service.close()
    service = EngineService(parts, MovingSplit(parts.units), slots=32, overlap=True)
    aborted = {a.id for a in arrivals if chance.random() < 0.3}
    service.abort_after = {id: chance.randrange(8) for id in sorted(aborted)}
    events = [
        event
        for arrive in arrivals
        for event in (arrive, *[Abort(arrive.id)] * (service.abort_after.get(arrive.id) == 7))
    ]
    answers = service.run_requests(events, expected=len(arrivals))
    for arrive in arrivals:
        if arrive.id in aborted:
            assert answers.get(arrive.id, []) == truth[arrive.id][: len(answers.get(arrive.id, []))]
        else:
            assert answers[arrive.id] == truth[arrive.id]
    service.close()
    parts.close()


# ---------------------------------------------------------------- the start


def config(**flags) -> Config:
    return Config().replace(
        **{
            "model": "smollm2-135m",
            "load_format": "dummy",
            "max_running": 8,
            "kv_pages": 300,
            **flags,
        }
    )


def test_open_cuda_makes_a_device_that_decodes():
    from counterpoint.device.cuda.device_setup import open_cuda
    from counterpoint.device.event_queue import WallClockEventQueue
    from counterpoint.spec.source import resolve_model

    said: list[str] = []
    source: ModelSource = resolve_model("smollm2-135m", "/nonexistent")
    device = open_cuda(config(policy="multiplex", split=32), source, said.append)
    assert device.levels == (32,) and device.pages == 300 and device.isolated
    assert any("decode on SMs" in note for note in device.notes)
    inbox = WallClockEventQueue()
    executor = device.executor((Lane(0, Role.DECODE, 2), Lane(1, Role.PREFILL, 2)), inbox)
    from cuda_rig import StepRig

    r = StepRig(device, executor, inbox)  # pyright: ignore[reportArgumentType]
    r.open(0, PROMPT)
    assert len(tokens_of(r.generate(0, len(PROMPT), 6, units=32))) == 6
    executor.close()
    assert any("graphs captured" in line for line in said)


EIGHT_BITS = {"quantization": "fp8", "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("flags", [{}, EIGHT_BITS], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("policy", ["serial", "chunked", "multiplex", "auto"])
def test_the_built_system_generates_under_every_policy(policy: str, flags: dict[str, str]):
    from counterpoint.builder import system_builder
    from counterpoint.core.loop import run
    from counterpoint.device.event_queue import WallClockEventQueue
    from counterpoint.types import OutputDelta

    inbox = WallClockEventQueue()
    system = system_builder.build_system(
        config(policy=policy, device="cuda", **flags), inbox, lambda _: None
    )
    assert "SMs" in system.lanes
    arrivals, answers, ended = random_requests(20, vocab=40000, max_prompt_tokens=200), {}, []

    def deliver(outputs, engine) -> None:
        for output in outputs:
            if isinstance(output, OutputDelta):
                assert not output.error
                answers.setdefault(output.id, []).extend(output.tokens)
                ended.extend([output.id] * (output.finish_reason is not None))
        if len(ended) == len(arrivals) and engine.idle:
            inbox.stop()

    for arrive in arrivals:
        inbox.put(arrive)
    run(system.engine, inbox, system.executor, deliver)
    system.executor.close()
    assert all(len(answers[a.id]) <= a.sampling.max_tokens and answers[a.id] for a in arrivals)


def test_config_errors_state_the_numbers():
    from counterpoint.device.cuda.device_setup import open_cuda
    from counterpoint.spec.source import resolve_model

    source = resolve_model("smollm2-135m", "/nonexistent")
    with pytest.raises(ConfigError, match=r"kv_pages to at most \d+"):
        open_cuda(config(kv_pages=10**8, policy="serial"), source, lambda _: None)
    with pytest.raises(ConfigError, match="weights need"):
        open_cuda(
            config(model="llama-3.1-70b", dtype="float32", policy="serial"),
            resolve_model("llama-3.1-70b", "/nonexistent"),
            print,
        )
    with pytest.raises(ConfigError, match="quantization is fp8, dtype float16"):
        open_cuda(config(quantization="fp8", dtype="float16"), source, lambda _: None)
    with pytest.raises(ConfigError, match="split is 13"):
        open_cuda(config(policy="multiplex", split=13), source, lambda _: None)


def test_a_reused_slot_keeps_no_old_state():
    with rig() as r:
        r.open(0, PROMPT)
        first = tokens_of(r.generate(0, len(PROMPT), 4))
        r.open(0, PROMPT[5:])
        r.generate(0, len(PROMPT) - 5, 4, first_page=20)
        r.open(0, PROMPT)
        assert tokens_of(r.generate(0, len(PROMPT), 4, first_page=40)) == first
        r.run([Segment(0, len(PROMPT) + 3, 1, True)], decode=True)
