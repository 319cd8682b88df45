"""Chunked."""

from __future__ import annotations

from engine_harness import make_harness


def test_chunked_never_holds_a_decode_back_and_keeps_its_budget():
    h = make_harness("chunked")
    h.arrive("a", range(5), max_tokens=20)
    h.step()
    h.arrive("b", range(60, 130), max_tokens=2)
    h.step()
    while h.device.busy():
        work = h.device.queue[0][0].work
        assert work.prefill_tokens + work.decode_batch <= 16
        assert work.decode_batch >= 1 or "a" in h.ends
        h.step()
    h.check_answers()
