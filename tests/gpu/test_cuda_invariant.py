"""--batch-invariant on a GPU: equal bits for any batch, chunking and SM partition."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cuda_rig import HAS_GPU, TINY, make_parts
from cuda_service import EngineService, random_requests
from msgspec import structs

from counterpoint.config import Config
from counterpoint.core.policy import Chunked, Multiplex, Serial
from counterpoint.device.cuda.attention import PrefillAttention, reference_decode
from counterpoint.interfaces import Policy
from counterpoint.types import AddRequest, TokenLogprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUND = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PAGE = 16


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.double() - truth.double()).norm() / truth.double().norm())


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(130, 200), (4096, 1024), (1024, 14336)])
def test_product_bits_do_not_depend_on_the_batch(dtype: torch.dtype, outputs: int, inputs: int):
    from counterpoint.device.cuda.batch_invariant import matmul

    x, weight = drawn(300, inputs, dtype=dtype), drawn(outputs, inputs, dtype=dtype)
    whole = matmul(x, weight)
    assert error(whole, x.double() @ weight.double().T) < BOUND[dtype] * max(
        1, inputs / 2048
    )  # one sum, from first to last
    for first, rows in ((0, 1), (299, 1), (77, 1), (3, 2), (50, 16), (61, 64), (1, 65), (100, 129)):
        assert torch.equal(matmul(x[first : first + rows], weight), whole[first : first + rows]), (
            first,
            rows,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 16), (6, 2, 24), (8, 1, 64), (32, 8, 128)]
)
def test_attention_bits_are_equal_in_decode_prefill_and_chunk(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int
):
    from counterpoint.device.cuda.batch_invariant import InvariantPlanner, decode_attention

    spec = dataclasses.replace(TINY, heads=heads, kv_heads=kv_heads, head_dim=size)
    k_pages, v_pages = (drawn(80, PAGE, kv_heads, size, dtype=dtype) for _ in range(2))
    table = torch.randperm(80, device="cuda", dtype=torch.int32).view(2, 40)
    contexts = (611, 97)

    def gathered(pages: torch.Tensor, row: int) -> torch.Tensor:
        at = torch.arange(contexts[row], device="cuda")
        return pages[table[row, at // PAGE].long(), at % PAGE]

    k, v = (torch.cat([gathered(pages, 0), gathered(pages, 1)]) for pages in (k_pages, v_pages))
    q = drawn(300 + 97, heads, size, dtype=dtype)
    planner = InvariantPlanner(spec, q.device)

    def prefilled(
        plan: PrefillAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        out = torch.full_like(q, torch.nan)
        plan.run(q, k, v, out)
        return out.flatten(1)

    whole = prefilled(planner.plan((300, 97), contexts), q, k, v)
    lengths = torch.arange(312, 612, dtype=torch.int32, device="cuda")
    each = decode_attention(
        q[:300], k_pages, v_pages, table[:1].expand(300, -1).contiguous(), lengths
    )
    assert (
        error(each, reference_decode(q[:300], k_pages, v_pages, table[:1].expand(300, -1), lengths))
        < BOUND[dtype]
    )
    assert torch.equal(whole[:300], each)
    for first, rows in ((0, 1), (13, 50), (299, 1)):
        end = 311 + first + rows
        chunk = prefilled(planner.plan((rows,), (end,)), q[first : first + rows], k[:end], v[:end])
        assert torch.equal(chunk, whole[first : first + rows]), (first, rows)
        alone = decode_attention(
            q[first : first + 1], k_pages, v_pages, table[:1], lengths[first : first + 1]
        )
        assert torch.equal(alone, whole[first : first + 1])


def numbers(chances: list[TokenLogprobs | None]) -> list[tuple[float, ...]]:
    """Without ids: among equally likely alternatives, any may be reported."""
    return [(known.logprob, *known.top_logprobs) for known in chances if known is not None]


def asked(logprobs: int | None) -> list[AddRequest]:
    return [
        structs.replace(a, sampling=structs.replace(a.sampling, logprobs=logprobs))
        for a in random_requests(24, max_prompt_tokens=150)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_bitwise_equal_under_every_policy(dtype: torch.dtype):
    parts = make_parts(pages=160, slots=16, dtype=dtype, invariant=True)
    service = EngineService(parts, Serial(400, parts.units), slots=16, max_pass_tokens=400)
    truth = {}
    for arrive in asked(4):
        service.run_requests([arrive])
        truth[arrive.id] = service.answers[arrive.id], numbers(service.logprobs[arrive.id])
    service.close()
    policies: dict[str, Policy] = {
        "serial": Serial(400, parts.units, depth=2),
        "chunked": Chunked(37, parts.units, depth=2),
        "multiplex": Multiplex(400, parts.units, 16, layer_group=1, depth=2),
    }
    for name, policy in policies.items():
        for logprobs in (4, None):
            service = EngineService(parts, policy, slots=16, overlap=True)
            for round in ("cold", "with prefix hits"):
                service.run_requests(asked(logprobs))
                for id, (tokens, chances) in truth.items():
                    assert service.answers[id] == tokens, (name, round)
                    assert logprobs is None or numbers(service.logprobs[id]) == chances, (
                        name,
                        round,
                    )
            service.close()
    parts.close()


def test_open_cuda_supports_batch_invariant():
    from counterpoint.device.cuda.device_setup import open_cuda
    from counterpoint.spec.source import resolve_model

    flags = {
        "model": "smollm2-135m",
        "load_format": "dummy",
        "max_running": 8,
        "kv_pages": 300,
        "policy": "multiplex",
        "split": 32,
    }
    said: list[str] = []
    device = open_cuda(
        Config().replace(**flags, batch_invariant=True),
        resolve_model("smollm2-135m", "/nonexistent"),
        said.append,
    )
    assert "batch-invariant" in device.decoder.ops.name and any(
        "graphs captured" in line for line in said
    )
