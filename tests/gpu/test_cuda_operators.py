"""GPU operators, in Triton and CUDA C++, against the reference on the CPU."""

from __future__ import annotations

import pytest
import torch
from cuda_rig import HAS_GPU, PAGE

from counterpoint.model.ops import reference_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")]

BOUND = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.cpu().double() - truth.double()).norm() / truth.double().norm())


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (37, 4096), (300, 960)])
def test_triton_norms_and_activation_equal_the_reference(dtype: torch.dtype, rows: int, size: int):
    from counterpoint.device.cuda import triton_kernels

    truth = reference_ops()
    x, delta, gates = (
        random_tensor(rows, size, dtype=dtype),
        random_tensor(rows, size, dtype=dtype),
        random_tensor(rows, 2 * size, dtype=dtype),
    )
    weight = random_tensor(size, dtype=dtype)
    cpu = [t.float().cpu() for t in (x, delta, weight, gates)]
    assert (
        relative_error(
            triton_kernels.rms_norm(x, weight, 1e-5), truth.rms_norm(cpu[0], cpu[2], 1e-5)
        )
        < BOUND[dtype]
    )
    assert relative_error(triton_kernels.silu_mul(gates), truth.silu_mul(cpu[3])) < BOUND[dtype]
    total, normed = triton_kernels.add_rms_norm(x.clone(), delta.clone(), weight, 1e-5)
    assert relative_error(total, cpu[0] + cpu[1]) < BOUND[dtype]
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, triton_kernels.rms_norm(x + delta, weight, 1e-5)), (
        "an add and a norm, bit for bit"
    )


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 16), (9, 3, 64), (32, 8, 128), (6, 2, 24)]
)
def test_triton_rope_append_gather_and_decode_equal_the_reference(
    dtype: torch.dtype, by_head: bool, heads: int, kv_heads: int, size: int
):
    from counterpoint.device.cuda import triton_kernels
    from counterpoint.device.cuda.attention import reference_decode
    from counterpoint.device.cuda.ops import rope_angles

    rows, pages = 33, 40
    shape = (pages, kv_heads, PAGE, size) if by_head else (pages, PAGE, kv_heads, size)
    k, v = (torch.full(shape, float("nan"), device="cuda", dtype=dtype) for _ in range(2))
    if by_head:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    x = random_tensor(rows, (heads + 2 * kv_heads) * size, dtype=dtype)
    norms = [random_tensor(size, dtype=dtype) for _ in range(2)]
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
    assert relative_error(q, q_truth) < max(BOUND[dtype], 1e-5)
    k_got, v_got = triton_kernels.gather_context(k, v, at.int())
    assert relative_error(k_got, k_truth.flatten(0, 1)[at.cpu()]) < max(BOUND[dtype], 1e-5)
    assert relative_error(v_got, v_truth.flatten(0, 1)[at.cpu()]) == 0

    k.copy_(random_tensor(*k.shape, dtype=dtype))
    v.copy_(random_tensor(*v.shape, dtype=dtype))
    lengths = torch.tensor([1, 16, 17, 200, 333], dtype=torch.int32)
    tables = torch.stack([torch.randperm(pages)[:24] for _ in lengths]).int()
    q = random_tensor(len(lengths), heads, size, dtype=dtype)
    cpu = [t.float().cpu() for t in (q, k, v)]
    truth_out = reference_decode(*cpu, tables, lengths)
    for units in (8, 132):
        out = torch.full((len(lengths), heads * size), float("nan"), device="cuda", dtype=dtype)
        triton_kernels.decode_attention(q, k, v, tables.cuda(), lengths.cuda(), units, out)
        assert relative_error(out, truth_out) < max(BOUND[dtype], 1e-5)


SIXTEEN = [torch.bfloat16, torch.float16]


def layer_kernels(dtype: torch.dtype, hidden: int, head_dim: int, chained: bool):
    from counterpoint.device.cuda.kernels.layer import LayerKernels, LayerShape

    return LayerKernels(LayerShape(dtype, hidden, head_dim), 132, chained=chained)


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (3, 8192), (37, 960), (65, 64), (2, 16384)])
def test_layer_kernel_norms_and_activation_equal_the_reference(
    dtype: torch.dtype, chained: bool, rows: int, size: int
):
    kernels, truth = layer_kernels(dtype, size, 64, chained), reference_ops()
    x, delta, gates = (
        random_tensor(rows, size, dtype=dtype),
        random_tensor(rows, size, dtype=dtype),
        random_tensor(rows, 2 * size, dtype=dtype),
    )
    weight = random_tensor(size, dtype=dtype)
    cpu = [t.float().cpu() for t in (x, delta, weight, gates)]
    assert (
        relative_error(kernels.rms_norm(x, weight, 1e-5), truth.rms_norm(cpu[0], cpu[2], 1e-5))
        < BOUND[dtype]
    )
    assert relative_error(kernels.silu_mul(gates), truth.silu_mul(cpu[3])) < BOUND[dtype]
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
def test_layer_kernel_rope_append_and_gather_equal_the_reference(
    dtype: torch.dtype, normed: bool, by_head: bool, heads: int, kv_heads: int, size: int
):
    from counterpoint.device.cuda.ops import rope_angles

    kernels, truth = layer_kernels(dtype, 512, size, True), reference_ops()
    rows, pages = 33, 40
    shape = (pages, kv_heads, PAGE, size) if by_head else (pages, PAGE, kv_heads, size)
    k, v = (torch.full(shape, float("nan"), device="cuda", dtype=dtype) for _ in range(2))
    if by_head:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    x = random_tensor(rows, (heads + 2 * kv_heads) * size, dtype=dtype)
    norms = [random_tensor(size, dtype=dtype) if normed else None for _ in range(2)]
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
    assert relative_error(q, q_truth) < BOUND[dtype]
    k_got, v_got = kernels.gather_context(k, v, at.int())
    assert relative_error(k_got, k_truth.flatten(0, 1)[at.cpu()]) < BOUND[dtype]
    assert relative_error(v_got, v_truth.flatten(0, 1)[at.cpu()]) == 0
    assert int(k.isfinite().sum()) == rows * kv_heads * size, "a write beside the rows"


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1000, 576), (17, 8)])
def test_few_row_products_equal_the_reference(
    dtype: torch.dtype, rows: int, outputs: int, inputs: int
):
    kernels = layer_kernels(dtype, 512, 64, True)
    x, weight = (
        random_tensor(rows, inputs, dtype=dtype),
        random_tensor(outputs, inputs, dtype=dtype),
    )
    got = kernels.few_rows(x, weight)
    assert relative_error(got, x.float().cpu() @ weight.float().cpu().T) < BOUND[dtype]


@pytest.mark.parametrize("units", [16, 132])
def test_every_tuned_product_equals_the_reference(units: int):
    from counterpoint.device.cuda.gemm_autotune import DECODE_PROBES, PREFILL_PROBES, GemmAutotuner

    kernels = layer_kernels(torch.bfloat16, 512, 64, True)
    products = GemmAutotuner(units, kernels, torch.device("cuda", 0), chained=True)
    weights = [[random_tensor(1536, 1024, dtype=torch.bfloat16) * 0.05 for _ in range(3)]]
    products.tune(weights, torch.cuda.Stream(), DECODE_PROBES + PREFILL_PROBES)
    assert len(products.names) == len(DECODE_PROBES) + len(PREFILL_PROBES)
    for rows in (1, 2, 3, 4, 7, 64, 100, 128, 200, 256, 700, 1024, 1500):
        x = random_tensor(rows, 1024, dtype=torch.bfloat16)
        truth = x.float().cpu() @ weights[0][0].float().cpu().T
        assert (
            relative_error(products.linear(x, (weights[0][0], None)), truth) < BOUND[torch.bfloat16]
        )
        for name, product in products.candidates(weights[0][0], rows).items():
            assert relative_error(product(x, weights[0][0]), truth) < BOUND[torch.bfloat16], name


@pytest.mark.parametrize(("rows", "vocab"), [(1, 300), (7, 32003), (64, 128256)])
def test_the_filter_floor_equals_sorting(rows: int, vocab: int):
    from counterpoint.device.cuda.kernels.floor import FilterFloor
    from counterpoint.model.sample import filter_floor

    x = random_tensor(rows, vocab) * torch.rand(rows, 1, device="cuda") * 6
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
