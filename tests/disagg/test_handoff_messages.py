"""The wire format: messages round-trip, and anything else is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle

import msgspec
import pytest
from engine_pair import make_request
from hypothesis import given
from hypothesis import strategies as st

import counterpoint.disagg.messages as wire
from counterpoint.disagg.handoff_events import engine_id, handoff_of
from counterpoint.disagg.messages import HandoffId, SampledToken, WireError
from counterpoint.disagg.peer_connection import CompatibilityDigest, find_mismatch, make_digest
from counterpoint.spec import ModelSpec
from counterpoint.types import DisaggRole, TokenLogprobs

ENDS = (HandoffId("r", 3), 1 << 62, 17, 4)
MESSAGES = [
    wire.HandoffOffer(*ENDS, make_request(), 12.5),
    wire.OfferQueued(*ENDS),
    wire.PagesReserved(*ENDS, (4, 5), 2),
    wire.TransferStarted(*ENDS),
    wire.TransferDone(
        *ENDS, SampledToken(3, TokenLogprobs(-1.5, (3, 4), (-1.5, -2.0)), 16), 24, 99
    ),
    wire.TransferAck(*ENDS),
    wire.AbortHandoff(*ENDS, "why"),
    wire.HandoffDrained(*ENDS, ""),
    wire.LinkHeartbeat(1, 2, (HandoffId("r", 3),)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_come_back_whole(message):
    assert wire.decode(wire.encode(message)) == message


def test_every_message_is_here():
    assert {type(message) for message in MESSAGES} == set(wire.Message.__args__)


@given(st.binary(max_size=200))
def test_noise_is_refused(data):
    with pytest.raises(WireError):
        wire.decode(data)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_damaged_message_is_refused_or_still_a_message(message, data):
    raw = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        wire.decode(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


def test_pickles_are_refused():
    with pytest.raises(WireError):
        wire.decode(pickle.dumps(("offer", 1)))


def test_sizes_are_bounded(monkeypatch):
    with pytest.raises(WireError, match="not a handoff message"):
        wire.decode(
            wire.encode(wire.LinkHeartbeat(1, 2, (HandoffId("r", 1),) * (wire.MAX_LEASES + 1)))
        )
    with pytest.raises(WireError, match="not a handoff message"):
        wire.decode(wire.encode(wire.AbortHandoff(*ENDS, "x" * 501)))
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 100)
    for call in (
        lambda: wire.encode(wire.HandoffOffer(*ENDS, make_request(200), 1.0)),
        lambda: wire.decode(b"x" * 101),
    ):
        with pytest.raises(WireError, match="at most 100"):
            call()


def test_engine_names():
    for part in (DisaggRole.PREFILL, DisaggRole.DECODE):
        assert handoff_of(engine_id(HandoffId("a request", 12), part)) == (
            HandoffId("a request", 12),
            part,
        )
    assert handoff_of("a request") is None


SPEC = ModelSpec(
    name="m",
    family="llama",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=64,
    vocab=50,
    max_context_tokens=64,
)


def test_equal_workers_fit():
    digest = make_digest(SPEC, "seed 1", "float32", 16)
    assert find_mismatch(digest, make_digest(SPEC, "seed 1", "float32", 16)) == ""
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(digest), type=CompatibilityDigest) == digest
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol", 99),
        ("weights", "seed 2"),
        ("layers", 3),
        ("kv_dtype", "bfloat16"),
        ("page_tokens", 32),
        ("rope", "other"),
    ],
)
def test_a_refusal_names_the_field(field, value):
    digest = make_digest(SPEC, "seed 1", "float32", 16)
    words = find_mismatch(digest, msgspec.structs.replace(digest, **{field: value}))
    assert words.startswith(f"{field} differs: ") and repr(value) in words


def test_a_difference_that_has_no_field_of_its_own_is_seen():
    other = make_digest(dataclasses.replace(SPEC, qkv_bias=True), "seed 1", "float32", 16)
    assert find_mismatch(make_digest(SPEC, "seed 1", "float32", 16), other).startswith(
        "model differs"
    )
