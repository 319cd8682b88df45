"""Serial."""

from __future__ import annotations

from engine_harness import make_harness


def test_serial_decodes_nothing_while_a_prompt_waits():
    h = make_harness("serial")
    h.arrive("a", range(5), max_tokens=10)
    h.step()
    h.arrive("b", range(60, 90), max_tokens=2)
    h.step()
    step = h.device.queue[0][0]
    assert step.work.prefill_tokens == 30 and step.work.decode_batch == 0
