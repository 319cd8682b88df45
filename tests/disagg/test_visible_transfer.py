"""The protocol on a virtual clock hides as much of a transfer as the formula says."""

from __future__ import annotations

import numpy as np
import pytest

from counterpoint.disagg import handoff_events
from counterpoint.disagg.handoff import Handoffs
from counterpoint.disagg.handoff_events import (
    HandoffConfig,
    HandoffTimes,
    KvGeometry,
    TransferGranularity,
    engine_id,
)
from counterpoint.disagg.messages import HandoffId
from counterpoint.disagg.router import visible_transfer_s
from counterpoint.kv_transfer.memory import KvMemory
from counterpoint.kv_transfer.sim import SimNetwork, SimTransport
from counterpoint.kv_transfer.transport import Completed
from counterpoint.types import AddRequest, Admitted, Computed, DisaggRole, OutputDelta, Sampling

LAYERS, PAGES, PAGE_TOKENS, PAGE_BYTES = 8, 64, 16, 1024
TOTAL_BYTES = 2 * LAYERS * PAGES * PAGE_BYTES
ID = HandoffId("r", 1)


def handover(
    grain: TransferGranularity,
    prefill_s: float,
    bandwidth: float,
    chunks: int = 1,
    late_s: float = 0.0,
) -> HandoffTimes:
    """One prompt of PAGES pages, computed in `chunks` passes of LAYERS equal layers. The decode
    worker has room after `late_s`."""
    network = SimNetwork(bandwidth=bandwidth)
    movers: dict[str, SimTransport] = {}
    links = [SimTransport(network, name, movers) for name in "pd"]
    for link in links:
        link.register(
            KvMemory(
                tuple(np.zeros(PAGES * PAGE_BYTES, np.uint8) for _ in range(2 * LAYERS)), PAGE_BYTES
            )
        )
    p, d = (
        Handoffs(
            HandoffConfig(peer_timeout_s=1e9, park_timeout_s=1e9, lease_s=1e9),
            KvGeometry(LAYERS, PAGE_TOKENS),
        )
        for _ in range(2)
    )
    links[0].connect(1, 2, b"d", True)
    p.on_event(0.0, handoff_events.LinkUp(1, 2, "d", DisaggRole.PREFILL))
    d.on_event(0.0, handoff_events.LinkUp(2, 1, "p", DisaggRole.DECODE))
    times: list[HandoffTimes] = []

    def obey(now: float) -> None:
        while commands := [(p, c) for c in p.take_commands()] + [(d, c) for c in d.take_commands()]:
            for side, command in commands:
                if isinstance(command, handoff_events.SendMessage):
                    (d if side is p else p).on_event(now, command.message)
                elif isinstance(command, handoff_events.WriteKv):
                    memory = links[0].memory
                    assert memory is not None
                    spans = memory.spans(
                        command.first_layer,
                        command.last_layer,
                        command.sources,
                        command.destinations,
                    )
                    links[0].write(command.link, command.generation, spans, command.op)
                elif isinstance(command, handoff_events.HandoffEnded) and command.times is not None:
                    times.append(command.times)

    prompt = tuple(range(PAGES * PAGE_TOKENS))
    events: list[tuple[float, Handoffs, object]] = [
        (
            0.0,
            p,
            handoff_events.StartHandoff(
                ID,
                AddRequest(id="r", prompt=prompt, sampling=Sampling(max_tokens=5)),
                1,
                1e9,
                grain,
            ),
        ),
        (0.0, p, Admitted(engine_id(ID, DisaggRole.PREFILL), tuple(range(PAGES)), 0)),
        (late_s, d, Admitted(engine_id(ID, DisaggRole.DECODE), tuple(range(PAGES)), 0)),
    ]
    for step in range(chunks * LAYERS):
        chunk, layer = divmod(step, LAYERS)
        done, ahead = (len(prompt) * part // chunks for part in (chunk, chunk + 1))
        at = prefill_s * (step + 1) / (chunks * LAYERS)
        state = Computed(engine_id(ID, DisaggRole.PREFILL), done, ahead, layer + 1)
        events.append((at, p, state if layer + 1 < LAYERS else Computed(state.id, ahead, ahead)))
    events.append((prefill_s, p, OutputDelta(engine_id(ID, DisaggRole.PREFILL), (7,))))
    events.sort(key=lambda event: event[0])
    while not times:
        write_s = network.next_write_s
        if events and (write_s is None or events[0][0] <= write_s):
            now, side, event = events.pop(0)
            network.now = now
            side.on_event(now, event)  # type: ignore[arg-type]
        else:
            assert write_s is not None
            now = write_s
            network.advance(now)
            for notice in links[0].poll():
                assert isinstance(notice, Completed)
                p.on_event(now, handoff_events.WriteDone(notice.op, notice.error))
        obey(now)
    return times[0]


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize(
    ("grain", "chunks"),
    [
        (TransferGranularity.PROMPT, 1),
        (TransferGranularity.LAYER, 1),
        (TransferGranularity.CHUNK, 4),
        (TransferGranularity.LAYER, 4),
    ],
)
def test_the_visible_part_is_that_of_the_formula(grain, chunks, ratio):
    """`ratio`: the transfer's time over the prefill's."""
    prefill_s = 1.0
    bandwidth = TOTAL_BYTES / (ratio * prefill_s)
    groups = {
        TransferGranularity.PROMPT: 1,
        TransferGranularity.CHUNK: chunks,
        TransferGranularity.LAYER: chunks * LAYERS,
    }[grain]
    times = handover(grain, prefill_s, bandwidth, chunks)
    assert times.page_layers == PAGES * LAYERS
    assert times.visible_s == pytest.approx(
        visible_transfer_s(TOTAL_BYTES, prefill_s, bandwidth, groups), rel=1e-6
    )


@pytest.mark.parametrize("grain", TransferGranularity)
def test_the_time_of_sending_is_that_in_which_bytes_move(grain):
    """Whatever lies between the writes, bytes over it are what the link carries."""
    for bandwidth in (TOTAL_BYTES / 0.1, TOTAL_BYTES / 3.0):
        times = handover(grain, 1.0, bandwidth, chunks=4)
        assert TOTAL_BYTES / times.sending_s == pytest.approx(bandwidth)


def test_what_is_reserved_late_is_seen_whole():
    times = handover(TransferGranularity.LAYER, 1.0, TOTAL_BYTES / 0.5, late_s=2.0)
    assert times.reserved_s == 2.0 and times.visible_s == pytest.approx(0.5)
    times = handover(TransferGranularity.LAYER, 1.0, TOTAL_BYTES / 0.8, late_s=0.5)
    assert times.visible_s == pytest.approx(0.3), (
        "what was computed by then goes at once, and the rest behind it"
    )
