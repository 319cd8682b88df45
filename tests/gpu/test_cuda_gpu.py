"""What only a GPU can show: kernels and families against the reference, 16-bit arithmetic, stress with moving splits, the start."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from cuda_rig import GREEDY, HAS_GPU, LEVELS, PAGE, TINY, VOCAB, Service, make_parts, requests, rig
from test_cuda_executor import PROMPT, greedy_by_reference, reference_logits, tokens_of

from counterpoint.config import Config, ConfigError
from counterpoint.core.policy import Multiplex, Serial
from counterpoint.model.ops import reference_ops
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
BOUND = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.cpu().double() - truth.double()).norm() / truth.double().norm())


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


# ---------------------------------------------------------------- operations


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (37, 4096), (300, 960)])
def test_norms_and_activation(dtype: torch.dtype, rows: int, size: int):
    from counterpoint.device.cuda import triton_kernels

    truth = reference_ops()
    x, delta, gates = (
        drawn(rows, size, dtype=dtype),
        drawn(rows, size, dtype=dtype),
        drawn(rows, 2 * size, dtype=dtype),
    )
    weight = drawn(size, dtype=dtype)
    cpu = [t.float().cpu() for t in (x, delta, weight, gates)]
    assert (
        error(triton_kernels.rms_norm(x, weight, 1e-5), truth.rms_norm(cpu[0], cpu[2], 1e-5))
        < BOUND[dtype]
    )
    assert error(triton_kernels.silu_mul(gates), truth.silu_mul(cpu[3])) < BOUND[dtype]
    total, normed = triton_kernels.add_rms_norm(x.clone(), delta.clone(), weight, 1e-5)
    assert error(total, cpu[0] + cpu[1]) < BOUND[dtype]
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, triton_kernels.rms_norm(x + delta, weight, 1e-5)), (
        "an add and a norm, bit for bit"
    )


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 16), (9, 3, 64), (32, 8, 128), (6, 2, 24)]
)
def test_rope_append_gather_and_decode(
    dtype: torch.dtype, by_head: bool, heads: int, kv_heads: int, size: int
):
    from counterpoint.device.cuda import triton_kernels
    from counterpoint.device.cuda.attention import decode_by_torch
    from counterpoint.device.cuda.ops import rope_angles

    rows, pages = 33, 40
    shape = (pages, kv_heads, PAGE, size) if by_head else (pages, PAGE, kv_heads, size)
    k, v = (torch.full(shape, float("nan"), device="cuda", dtype=dtype) for _ in range(2))
    if by_head:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    x = drawn(rows, (heads + 2 * kv_heads) * size, dtype=dtype)
    norms = [drawn(size, dtype=dtype) for _ in range(2)]
    at = torch.randperm(pages * PAGE)[:rows].cuda()
    frequencies = torch.rand(size // 2)
    angles = rope_angles(torch.arange(rows).cuda() + 5, frequencies.cuda(), 1.2)
    q = triton_kernels.rope_and_append(x, angles, *norms, 1e-5, k, v, at)
    truth = reference_ops()
    k_truth, v_truth = (torch.zeros(pages, PAGE, kv_heads, size) for _ in range(2))
    cpu_angles = truth.rope_angles(torch.arange(rows) + 5, frequencies, 1.2)
    cpu_norms = [n.float().cpu() for n in norms]
    q_truth = truth.rope_and_append(
        x.float().cpu(), cpu_angles, *cpu_norms, 1e-5, k_truth, v_truth, at.cpu()
    )
    assert error(q, q_truth) < max(BOUND[dtype], 1e-5)
    k_got, v_got = triton_kernels.gather_context(k, v, at.int())
    assert error(k_got, k_truth.flatten(0, 1)[at.cpu()]) < max(BOUND[dtype], 1e-5)
    assert error(v_got, v_truth.flatten(0, 1)[at.cpu()]) == 0

    k.copy_(drawn(*k.shape, dtype=dtype))
    v.copy_(drawn(*v.shape, dtype=dtype))
    lengths = torch.tensor([1, 16, 17, 200, 333], dtype=torch.int32)
    tables = torch.stack([torch.randperm(pages)[:24] for _ in lengths]).int()
    q = drawn(len(lengths), heads, size, dtype=dtype)
    cpu = [t.float().cpu() for t in (q, k, v)]
    truth_out = decode_by_torch(*cpu, tables, lengths)
    for units in (8, 132):
        out = torch.full((len(lengths), heads * size), float("nan"), device="cuda", dtype=dtype)
        triton_kernels.decode_attention(q, k, v, tables.cuda(), lengths.cuda(), units, out)
        assert error(out, truth_out) < max(BOUND[dtype], 1e-5)


SIXTEEN = [torch.bfloat16, torch.float16]


def layer_kernels(dtype: torch.dtype, hidden: int, head_dim: int, chained: bool):
    from counterpoint.device.cuda.kernels.layer import LayerKernels

    return LayerKernels(dtype, hidden, head_dim, 132, chained=chained)


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (3, 8192), (37, 960), (65, 64), (2, 16384)])
def test_layer_kernels_norms_and_activation(
    dtype: torch.dtype, chained: bool, rows: int, size: int
):
    kernels, truth = layer_kernels(dtype, size, 64, chained), reference_ops()
    x, delta, gates = (
        drawn(rows, size, dtype=dtype),
        drawn(rows, size, dtype=dtype),
        drawn(rows, 2 * size, dtype=dtype),
    )
    weight = drawn(size, dtype=dtype)
    cpu = [t.float().cpu() for t in (x, delta, weight, gates)]
    assert (
        error(kernels.rms_norm(x, weight, 1e-5), truth.rms_norm(cpu[0], cpu[2], 1e-5))
        < BOUND[dtype]
    )
    assert error(kernels.silu_mul(gates), truth.silu_mul(cpu[3])) < BOUND[dtype]
    total, normed = kernels.add_rms_norm(x.clone(), delta.clone(), weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, kernels.rms_norm(x + delta, weight, 1e-5)), (
        "an add and a norm, bit for bit"
    )


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(32, 8, 128), (9, 3, 64), (4, 1, 256), (5, 5, 128)]
)
def test_layer_kernels_rope_append_and_gather(
    dtype: torch.dtype, normed: bool, by_head: bool, heads: int, kv_heads: int, size: int
):
    from counterpoint.device.cuda.ops import rope_angles

    kernels, truth = layer_kernels(dtype, 512, size, True), reference_ops()
    rows, pages = 33, 40
    shape = (pages, kv_heads, PAGE, size) if by_head else (pages, PAGE, kv_heads, size)
    k, v = (torch.full(shape, float("nan"), device="cuda", dtype=dtype) for _ in range(2))
    if by_head:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    x = drawn(rows, (heads + 2 * kv_heads) * size, dtype=dtype)
    norms = [drawn(size, dtype=dtype) if normed else None for _ in range(2)]
    at = torch.randperm(pages * PAGE)[:rows].cuda()
    frequencies = torch.rand(size // 2)
    q = kernels.rope_and_append(
        x,
        rope_angles(torch.arange(rows).cuda() + 5, frequencies.cuda(), 1.2),
        *norms,
        1e-5,
        k,
        v,
        at,
    )
    k_truth, v_truth = (torch.zeros(pages, PAGE, kv_heads, size) for _ in range(2))
    cpu_norms = [None if n is None else n.float().cpu() for n in norms]
    cpu_angles = truth.rope_angles(torch.arange(rows) + 5, frequencies, 1.2)
    q_truth = truth.rope_and_append(
        x.float().cpu(), cpu_angles, *cpu_norms, 1e-5, k_truth, v_truth, at.cpu()
    )
    assert error(q, q_truth) < BOUND[dtype]
    k_got, v_got = kernels.gather_context(k, v, at.int())
    assert error(k_got, k_truth.flatten(0, 1)[at.cpu()]) < BOUND[dtype]
    assert error(v_got, v_truth.flatten(0, 1)[at.cpu()]) == 0
    assert int(k.isfinite().sum()) == rows * kv_heads * size, "a write beside the rows"


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1000, 576), (17, 8)])
def test_products_of_few_rows(dtype: torch.dtype, rows: int, outputs: int, inputs: int):
    kernels = layer_kernels(dtype, 512, 64, True)
    x, weight = drawn(rows, inputs, dtype=dtype), drawn(outputs, inputs, dtype=dtype)
    got = kernels.few_rows(x, weight)
    assert error(got, x.float().cpu() @ weight.float().cpu().T) < BOUND[dtype]


@pytest.mark.parametrize("units", [16, 132])
def test_every_measured_product_is_right(units: int):
    from counterpoint.device.cuda.gemm_autotune import MANY, PROBES, GemmAutotuner

    kernels = layer_kernels(torch.bfloat16, 512, 64, True)
    products = GemmAutotuner(units, kernels, torch.device("cuda", 0), chained=True)
    weights = [[drawn(1536, 1024, dtype=torch.bfloat16) * 0.05 for _ in range(3)]]
    products.measure(weights, torch.cuda.Stream(), PROBES + MANY)
    assert len(products.names) == len(PROBES) + len(MANY)
    for rows in (1, 2, 3, 4, 7, 64, 100, 128, 200, 256, 700, 1024, 1500):
        x = drawn(rows, 1024, dtype=torch.bfloat16)
        truth = x.float().cpu() @ weights[0][0].float().cpu().T
        assert error(products.linear(x, (weights[0][0], None)), truth) < BOUND[torch.bfloat16]
        for name, product in products.candidates(weights[0][0], rows).items():
            assert error(product(x, weights[0][0]), truth) < BOUND[torch.bfloat16], name


@pytest.mark.parametrize(("rows", "vocab"), [(1, 300), (7, 32003), (64, 128256)])
def test_the_filter_floor_is_the_sorts(rows: int, vocab: int):
    from counterpoint.device.cuda.kernels.floor import FilterFloor
    from counterpoint.model.sample import filter_floor

    x = drawn(rows, vocab) * torch.rand(rows, 1, device="cuda") * 6
    x = (x * 8).round() / 8 if rows == 7 else x  # with ties
    x[:, vocab // 2 :: 3] = -torch.inf
    x -= x.amax(1, keepdim=True)
    top_k = torch.randint(0, 60, (rows,), device="cuda")
    top_p = torch.rand(rows, device="cuda") * 1.1
    for k, p in (
        (top_k, top_p),
        (top_k, None),
        (torch.zeros_like(top_k), top_p),
        (top_k * 0 + 1, top_p),
        (top_k, top_p * 0),
    ):
        got, wanted = FilterFloor()(x, k, p), filter_floor(x, k, p, 0)
        kept, truth = ((x >= floor[:, None]).sum(1) for floor in (got, wanted))
        assert int((kept - truth).abs().max()) <= (1 if rows != 7 else vocab // 50), (
            "but for a logit at the border"
        )
        assert float((kept != truth).float().mean()) < 0.1


# ---------------------------------------------------------------- families


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_float32(name: str):
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
def test_sixteen_bits_choose_tokens_that_are_best_or_nearly(dtype: torch.dtype, spec: ModelSpec):
    """Through FlashInfer and the frugal kernel where they have the shape. A token that is not the reference's best must be within
    rounding of it."""
    prompt = [7 * n % VOCAB for n in range(1, 300)][: spec.max_context_tokens - 60]
    with rig(spec=spec, dtype=dtype, deviation=0.05) as r:
        r.open(0, prompt)
        got = tokens_of(r.generate(0, len(prompt), 24, units=LEVELS[0]))
    logits = reference_logits(spec, prompt + got, 0.05)[len(prompt) - 1 : -1, :VOCAB]
    chosen = logits.gather(1, torch.tensor(got)[:, None])[:, 0]
    assert ((logits.amax(1) - chosen) / logits.std(1)).max() < 0.25


# ---------------------------------------------------------------- stress


class Restless(Multiplex):
    """Multiplex whose split is another one every few steps."""

    def __init__(self, units: int, depth: int = 2) -> None:
        super().__init__(160, units, LEVELS[0], layer_group=1, depth=depth)
        self.turns = itertools.count()

    def next_batch(self, lane: Lane, state, now: float):
        if lane.role is Role.DECODE:
            self.split = LEVELS[next(self.turns) // 5 % len(LEVELS)]
        return super().next_batch(lane, state, now)


def test_aborts_and_moving_splits():
    """No leak, no wrong answer, no illegal access."""
    arrivals = requests(400, longest=150)
    chance = random.Random(1)
    parts = make_parts(pages=200, slots=32)
    service = Service(parts, Serial(400, parts.units, depth=2), slots=32, max_pass_tokens=400)
    truth = service.ask(arrivals)
    service.close()
    service = Service(parts, Restless(parts.units), slots=32, overlap=True)
    aborted = {a.id for a in arrivals if chance.random() < 0.3}
    service.abort_after = {id: chance.randrange(8) for id in sorted(aborted)}
    events = [
        event
        for arrive in arrivals
        for event in (arrive, *[Abort(arrive.id)] * (service.abort_after.get(arrive.id) == 7))
    ]
    answers = service.ask(events, expected=len(arrivals))
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


def test_the_whole_start():
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
    from cuda_rig import Rig

    r = Rig(device, executor, inbox)  # pyright: ignore[reportArgumentType]
    r.open(0, PROMPT)
    assert len(tokens_of(r.generate(0, len(PROMPT), 6, units=32))) == 6
    executor.close()
    assert any("graphs captured" in line for line in said)


EIGHT_BITS = {"quantization": "fp8", "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("flags", [{}, EIGHT_BITS], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("policy", ["serial", "chunked", "multiplex", "auto"])
def test_the_built_system_answers(policy: str, flags: dict[str, str]):
    from counterpoint import build
    from counterpoint.core.loop import run
    from counterpoint.device.event_queue import WallClockEventQueue
    from counterpoint.types import OutputDelta

    inbox = WallClockEventQueue()
    system = build.build_system(
        config(policy=policy, device="cuda", **flags), inbox, lambda _: None
    )
    assert "SMs" in system.lanes
    arrivals, answers, ended = requests(20, vocab=40000, longest=200), {}, []

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


def test_what_does_not_fit_is_refused_with_the_numbers():
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


def test_segments_are_not_confused_by_reuse():
    """A slot closed and opened again has none of its old tokens or pages."""
    with rig() as r:
        r.open(0, PROMPT)
        first = tokens_of(r.generate(0, len(PROMPT), 4))
        r.open(0, PROMPT[5:])
        r.generate(0, len(PROMPT) - 5, 4, first_page=20)
        r.open(0, PROMPT)
        assert tokens_of(r.generate(0, len(PROMPT), 4, first_page=40)) == first
        r.run([Segment(0, len(PROMPT) + 3, 1, True)], decode=True)
