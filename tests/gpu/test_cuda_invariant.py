"""--batch-invariant on a GPU: the same bits whatever shares a pass, however a prompt is cut, on whichever SMs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cuda_rig import HAS_GPU, TINY, Service, make_parts, requests
from msgspec import structs

from counterpoint.config import Config
from counterpoint.core.policy import Chunked, Multiplex, Serial
from counterpoint.device.cuda.attention import PrefillAttention, decode_by_torch
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
def test_a_row_of_a_product_has_the_same_bits_among_any(
    dtype: torch.dtype, outputs: int, inputs: int
):
    from counterpoint.device.cuda.batch_invariant import product

    x, weight = drawn(300, inputs, dtype=dtype), drawn(outputs, inputs, dtype=dtype)
    whole = product(x, weight)
    assert error(whole, x.double() @ weight.double().T) < BOUND[dtype] * max(
        1, inputs / 2048
    )  # one sum, from first to last
    for first, rows in ((0, 1), (299, 1), (77, 1), (3, 2), (50, 16), (61, 64), (1, 65), (100, 129)):
        assert torch.equal(product(x[first : first + rows], weight), whole[first : first + rows]), (
            first,
            rows,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 16), (6, 2, 24), (8, 1, 64), (32, 8, 128)]
)
def test_attention_has_the_same_bits_as_decode_prefill_and_chunk(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int
):
    from counterpoint.device.cuda.batch_invariant import InvariantPlanner, decode

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
    each = decode(q[:300], k_pages, v_pages, table[:1].expand(300, -1).contiguous(), lengths)
    assert (
        error(each, decode_by_torch(q[:300], k_pages, v_pages, table[:1].expand(300, -1), lengths))
        < BOUND[dtype]
    )
    assert torch.equal(whole[:300], each)
    for first, rows in ((0, 1), (13, 50), (299, 1)):
        end = 311 + first + rows
        chunk = prefilled(planner.plan((rows,), (end,)), q[first : first + rows], k[:end], v[:end])
        assert torch.equal(chunk, whole[first : first + rows]), (first, rows)
        alone = decode(
            q[first : first + 1], k_pages, v_pages, table[:1], lengths[first : first + 1]
        )
        assert torch.equal(alone, whole[first : first + 1])


def numbers(chances: list[TokenLogprobs | None]) -> list[tuple[float, ...]]:
    """Not the ids: of alternatives that are equally likely, any may be told."""
    return [(known.logprob, *known.top_logprobs) for known in chances if known is not None]


def asked(logprobs: int | None) -> list[AddRequest]:
    return [
        structs.replace(a, sampling=structs.replace(a.sampling, logprobs=logprobs))
        for a in requests(24, longest=150)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_answers_are_the_same_to_the_bit_on_a_gpu(dtype: torch.dtype):
    parts = make_parts(pages=160, slots=16, dtype=dtype, fixed=True)
    service = Service(parts, Serial(400, parts.units), slots=16, max_pass_tokens=400)
    truth = {}
    for arrive in asked(4):
        service.ask([arrive])
        truth[arrive.id] = service.answers[arrive.id], numbers(service.chances[arrive.id])
    service.close()
    policies: dict[str, Policy] = {
        "serial": Serial(400, parts.units, depth=2),
        "chunked": Chunked(37, parts.units, depth=2),
        "multiplex": Multiplex(400, parts.units, 16, layer_group=1, depth=2),
    }
    for name, policy in policies.items():
        for logprobs in (4, None):
            service = Service(parts, policy, slots=16, overlap=True)
            for round in ("cold", "with prefix hits"):
                service.ask(asked(logprobs))
                for id, (tokens, chances) in truth.items():
                    assert service.answers[id] == tokens, (name, round)
                    assert logprobs is None or numbers(service.chances[id]) == chances, (
                        name,
                        round,
                    )
            service.close()
    parts.close()


def test_a_batch_invariant_device_answers():
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
