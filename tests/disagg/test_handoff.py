"""Both sides of a handoff, case by case: what is sent when, and who owns the pages."""

from __future__ import annotations

import msgspec
import pytest
from engine_pair import D_NAME, ID, LAYERS, P_NAME, Pair, make_request

import counterpoint.disagg.messages as wire
from counterpoint.disagg import handoff_events
from counterpoint.disagg.handoff_context import PageHold
from counterpoint.disagg.handoff_events import HandoffOutcome, TransferGranularity
from counterpoint.disagg.messages import HandoffId
from counterpoint.types import (
    Abort,
    AddRequest,
    Admitted,
    Computed,
    DisaggRole,
    FinishReason,
    OutputDelta,
    Release,
    ResumeDecode,
)


def outcome(side) -> HandoffOutcome:
    ended = side.all(handoff_events.HandoffEnded)
    assert len(ended) == 1
    return ended[0].outcome


def written(side) -> list[tuple]:
    return [
        (w.first_layer, w.last_layer, w.sources, w.destinations)
        for w in side.all(handoff_events.WriteKv)
    ]


# ---------------------------------------------------------------- the usual course


def test_layers_are_sent_while_the_prompt_is_computed():
    pair = Pair()
    pair.start()
    pair.reserve()
    assert pair.d.last(handoff_events.GrantPages).pages == (1, 2, 3)
    pair.send(pair.p, Computed(P_NAME, 0, 10, 1))
    assert written(pair.p) == [(0, 1, (5, 6, 7), (1, 2, 3))]
    pair.send(pair.p, Computed(P_NAME, 0, 10, 3))
    assert written(pair.p)[1:] == [(1, 3, (5, 6, 7), (1, 2, 3))]
    pair.complete_writes()
    assert not pair.p.all(handoff_events.HandoffEnded)
    pair.prefill()
    assert written(pair.p)[2:] == [(3, 4, (5, 6, 7), (1, 2, 3))]
    pair.deliver_all()
    assert not pair.d.events_for_engine(ResumeDecode), "adopted before the last write had ended"
    pair.complete_writes()
    pair.deliver_all()
    assert pair.d.events_for_engine(ResumeDecode) == [ResumeDecode(D_NAME, 77)]
    assert (outcome(pair.p), outcome(pair.d)) == (HandoffOutcome.SENT, HandoffOutcome.ADOPTED)
    assert pair.d.last(handoff_events.HandoffEnded).first_token.token == 77
    assert pair.p.events_for_engine(Release) == [Release(P_NAME)] and not pair.d.events_for_engine(
        Release
    )
    assert pair.is_empty()


def test_chunks_are_sent_in_whole_pages():
    pair = Pair(granularity=TransferGranularity.CHUNK)
    pair.start()
    pair.reserve()
    pair.send(pair.p, Computed(P_NAME, 0, 6, 2))
    assert not written(pair.p)
    pair.send(pair.p, Computed(P_NAME, 6, 6, 0))
    assert written(pair.p) == [(0, LAYERS, (5,), (1,))]
    pair.prefill()
    assert written(pair.p)[1:] == [(0, LAYERS, (6, 7), (2, 3))]


def test_chunks_and_layers_together():
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.send(pair.p, Computed(P_NAME, 0, 6, 2))  # a chunk of 6 tokens: one page will be whole
    pair.send(pair.p, Computed(P_NAME, 6, 6, 0))
    pair.send(pair.p, Computed(P_NAME, 6, 10, 3))
    pair.prefill()
    assert written(pair.p) == [
        (0, 2, (5,), (1,)),
        (2, 4, (5,), (1,)),
        (0, 3, (6, 7), (2, 3)),
        (3, 4, (6, 7), (2, 3)),
    ]


def test_a_whole_prompt_at_once():
    pair = Pair(granularity=TransferGranularity.PROMPT, max_write_pages=2)
    pair.start()
    pair.reserve()
    pair.send(pair.p, Computed(P_NAME, 8, 10, 2))
    assert not written(pair.p)
    pair.prefill()
    assert written(pair.p) == [(0, LAYERS, (5, 6), (1, 2)), (0, LAYERS, (7,), (3,))]


def test_pages_that_the_decode_worker_has_are_not_sent():
    pair = Pair()
    pair.start()
    pair.reserve(pages=(8, 9, 3), cached=2)
    assert pair.d.last(handoff_events.GrantPages).pages == (3,)
    pair.prefill()
    assert written(pair.p) == [(0, LAYERS, (7,), (3,))]
    pair.complete_writes()
    pair.deliver_all()
    assert outcome(pair.d) is HandoffOutcome.ADOPTED and pair.is_empty()


def test_nothing_is_sent_if_it_has_all():
    pair = Pair()
    pair.start(tokens=12)
    pair.reserve(pages=(8, 9, 4), cached=3)
    pair.prefill(tokens=12)
    pair.deliver_all()
    assert not written(pair.p) and outcome(pair.d) is HandoffOutcome.ADOPTED and pair.is_empty()


def test_pages_in_the_prefill_workers_cache_go_at_once():
    pair = Pair(granularity=TransferGranularity.CHUNK)
    pair.start(cached=2)
    pair.reserve()
    assert written(pair.p) == [(0, LAYERS, (5, 6), (1, 2))]


def test_a_late_reservation_finds_the_pages_parked():
    pair = Pair()
    pair.start()
    pair.deliver_all()
    pair.prefill()
    assert pair.p.handoffs.ledger.pages(PageHold.PARKED) == 3 and not written(pair.p)
    pair.wait(2)
    pair.reserve()
    assert written(pair.p) == [(0, LAYERS, (5, 6, 7), (1, 2, 3))]
    assert pair.p.handoffs.ledger.pages(PageHold.PARKED) == 0
    pair.complete_writes()
    pair.deliver_all()
    assert outcome(pair.d) is HandoffOutcome.ADOPTED and pair.is_empty()


def test_no_pages_are_asked_for_before_the_prefill_worker_has_its_own():
    pair = Pair()
    pair.send(pair.p, handoff_events.StartHandoff(ID, make_request(), 1, 60.0))
    pair.wait(1)
    assert not pair.d.events_for_engine(AddRequest)
    pair.send(pair.p, Admitted(P_NAME, (5, 6, 7), 0))
    pair.deliver_all()
    assert pair.d.events_for_engine(AddRequest)[0].disagg_role is DisaggRole.DECODE


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_answer_of_one_token_is_not_handed_on(finish):
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.send(pair.p, Computed(P_NAME, 0, 10, 2))
    pair.prefill(finish=finish)
    pair.deliver_all()
    assert pair.d.handoffs.ledger.pages(PageHold.QUARANTINE) == 3, "a write is still in flight"
    pair.complete_writes()
    pair.deliver_all()
    assert outcome(pair.p) is HandoffOutcome.FINISHED and outcome(pair.d) is HandoffOutcome.ABORTED
    assert (
        not pair.d.events_for_engine(ResumeDecode)
        and pair.d.events_for_engine(Release) == [Release(D_NAME)]
        and pair.is_empty()
    )


def test_a_request_may_stay_where_it_was_prefilled():
    pair = Pair(park_timeout_s=1.0)
    pair.start()
    pair.deliver_all()
    pair.prefill()
    pair.wait(1.2)
    assert pair.p.last(handoff_events.Reroute).handoff == ID
    pair.send(pair.p, handoff_events.StayInPlace(ID))
    assert pair.p.events_for_engine(ResumeDecode) == [
        ResumeDecode(P_NAME, 77)
    ] and not pair.p.events_for_engine(Release)
    pair.deliver_all()
    assert (
        outcome(pair.p) is HandoffOutcome.DECODED_IN_PLACE
        and outcome(pair.d) is HandoffOutcome.ABORTED
        and pair.is_empty()
    )


def test_what_stays_waits_for_its_prefill_and_for_writes_that_read_it():
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.send(pair.p, Computed(P_NAME, 0, 10, 2))
    pair.send(pair.d, handoff_events.WithdrawRequest(ID))
    pair.deliver_all()
    pair.send(pair.p, handoff_events.StayInPlace(ID))
    pair.prefill()
    assert not pair.p.events_for_engine(ResumeDecode)
    pair.complete_writes()
    assert pair.p.events_for_engine(ResumeDecode) == [ResumeDecode(P_NAME, 77)]


# ---------------------------------------------------------------- messages get lost


def test_an_offer_is_repeated_until_it_is_answered():
    pair = Pair()
    pair.start()
    pair.drop_messages()
    pair.wait(0.7)
    assert pair.d.events_for_engine(AddRequest)
    before = len(pair.p.all(handoff_events.SendMessage))
    pair.wait(0.8)
    offers = [
        s
        for s in pair.p.all(handoff_events.SendMessage)[before:]
        if isinstance(s.message, wire.HandoffOffer)
    ]
    assert not offers, "it was answered"


@pytest.mark.parametrize(
    "kind", [wire.PagesReserved, wire.TransferStarted, wire.TransferDone, wire.TransferAck]
)
def test_each_message_may_be_lost_once(kind):
    pair = Pair()
    pair.start()
    pair.deliver_all()
    lost = []
    pair.send(pair.d, Admitted(D_NAME, (1, 2, 3), 0))
    pair.prefill()
    for _ in range(30):
        for side in (pair.p, pair.d):
            for letter in tuple(side.outbox):
                if isinstance(letter, kind) and not lost:
                    side.outbox.remove(letter)
                    lost.append(letter)
        step = (pair.p.outbox, pair.d.outbox)
        pair.p.outbox, pair.d.outbox = [], []
        for letter in step[0]:
            pair.send(pair.d, letter)
        for letter in step[1]:
            pair.send(pair.p, letter)
        pair.complete_writes()
        pair.wait(0.1, carry=False)
    assert (
        lost
        and outcome(pair.p) is HandoffOutcome.SENT
        and outcome(pair.d) is HandoffOutcome.ADOPTED
        and pair.is_empty()
    )


def test_repeated_and_late_messages_do_no_harm():
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.prefill()
    pair.complete_writes()
    pair.deliver_all()
    said = [s.message for side in (pair.p, pair.d) for s in side.all(handoff_events.SendMessage)]
    assert pair.is_empty()
    for message in said * 2:
        pair.send(pair.d if message.source == 1 else pair.p, message)
        pair.deliver_all()
    pair.complete_writes()
    assert (
        pair.is_empty()
        and len(pair.d.events_for_engine(ResumeDecode)) == 1
        and len(pair.d.events_for_engine(AddRequest)) == 1
    )
    assert pair.d.handoffs.unexpected > 0


def test_messages_of_another_incarnation_are_dropped():
    pair = Pair()
    pair.start()
    offer = pair.drop_messages()[0]
    for change in ({"source": 9}, {"destination": 9}):
        pair.send(pair.d, msgspec.structs.replace(offer, **change))
    assert not pair.d.events_for_engine(AddRequest) and pair.d.handoffs.unexpected == 2


def test_a_handoff_that_the_prefill_worker_has_forgotten_is_let_go():
    pair = Pair()
    pair.start()
    pair.deliver_all()
    pair.send(pair.p, handoff_events.WithdrawRequest(ID))
    pair.drop_messages()  # the decode worker does not hear of it
    assert pair.p.handoffs.idle and not pair.d.handoffs.idle
    pair.wait(1.2)
    assert pair.d.handoffs.idle, (
        "its heartbeat names the handoff, and the answer says that nobody knows it"
    )


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("moment", range(6))
@pytest.mark.parametrize("where", ["p", "d", "both"])
def test_the_client_leaves_at_any_moment(moment, where):
    pair = Pair()
    steps = [
        lambda: pair.send(pair.p, handoff_events.StartHandoff(ID, make_request(), 1, 60.0)),
        lambda: pair.send(pair.p, Admitted(P_NAME, (5, 6, 7), 0)),
        pair.reserve,
        lambda: pair.send(pair.p, Computed(P_NAME, 0, 10, 2)),
        pair.prefill,
        pair.complete_writes,
    ]
    for step in steps[: moment + 1]:
        step()
    for side in {"p": (pair.p,), "d": (pair.d,), "both": (pair.p, pair.d)}[where]:
        pair.send(side, handoff_events.WithdrawRequest(ID))
    pair.deliver_all()
    if where == "d":  # the front would answer the Reroute
        pair.send(pair.p, handoff_events.SettleSource(ID, "the client is gone"))
        pair.send(pair.p, handoff_events.WithdrawRequest(ID))
    pair.complete_writes()
    pair.deliver_all()
    assert pair.is_empty()
    assert len(pair.p.events_for_engine(Release)) == 1
    if not pair.d.events_for_engine(ResumeDecode):
        assert len(pair.d.events_for_engine(Release)) == len(pair.d.events_for_engine(AddRequest))


def test_an_abort_with_writes_in_flight_quarantines_the_pages():
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.prefill()
    pair.send(pair.d, handoff_events.WithdrawRequest(ID))
    pair.deliver_all()
    assert pair.p.all(handoff_events.CancelWrite), "the prefill worker tries to stop the write"
    assert pair.d.handoffs.ledger.pages(PageHold.QUARANTINE) == 3 and not pair.d.events_for_engine(
        Release
    )
    pair.wait(3)
    assert pair.d.handoffs.ledger.pages(PageHold.QUARANTINE) == 3, "time is no proof"
    pair.complete_writes("cancelled")
    pair.deliver_all()
    assert pair.d.events_for_engine(Release) == [Release(D_NAME)]


def test_proof_by_the_receiving_end_frees_the_pages_at_once():
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.prefill()
    pair.send(pair.d, handoff_events.WithdrawRequest(ID))
    pair.send(
        pair.d, handoff_events.PagesRevoked(pair.d.last(handoff_events.RevokePages).generation)
    )
    assert (
        pair.d.events_for_engine(Release) == [Release(D_NAME)] and pair.d.handoffs.ledger.is_empty
    )
    pair.complete_writes()
    pair.deliver_all()
    pair.send(pair.p, handoff_events.SettleSource(ID, ""))
    assert pair.is_empty() and len(pair.d.events_for_engine(Release)) == 1


def test_the_deadline_ends_both_sides_but_frees_nothing_by_itself():
    pair = Pair(drain_timeout_s=1000.0)
    pair.start(deadline_s=5.0)
    pair.reserve()
    pair.prefill()
    pair.wait(60)
    assert (
        outcome(pair.p) is HandoffOutcome.FAILED
        and "deadline" in pair.p.last(handoff_events.HandoffEnded).reason
    )
    assert pair.d.handoffs.ledger.pages(PageHold.QUARANTINE) == 3 and not pair.d.events_for_engine(
        Release
    )
    assert pair.p.handoffs.ledger.pages(PageHold.SENDING) == 3 and not pair.p.events_for_engine(
        Release
    )
    pair.complete_writes()
    pair.deliver_all()
    assert pair.is_empty()


def test_writes_that_never_end_condemn_their_link():
    pair = Pair(drain_timeout_s=4.0)
    pair.start(deadline_s=5.0)
    pair.reserve()
    pair.prefill()
    pair.wait(8)
    assert not pair.p.all(handoff_events.FenceLink) and not pair.d.all(handoff_events.FenceLink)
    pair.wait(2)
    assert pair.p.all(handoff_events.FenceLink) == [handoff_events.FenceLink(1)] and pair.d.all(
        handoff_events.FenceLink
    ) == [handoff_events.FenceLink(2)]
    pair.wait(100)
    assert not pair.d.events_for_engine(Release), "the fence is not proven yet"
    pair.send(pair.d, handoff_events.LinkFenced(2))
    pair.send(pair.p, handoff_events.LinkFenced(1))
    assert pair.is_empty() and pair.d.events_for_engine(Release) == [Release(D_NAME)]


def test_a_wrong_reservation_is_refused():
    pair = Pair()
    pair.start()
    pair.deliver_all()
    pair.send(pair.p, wire.PagesReserved(ID, 2, 1, 1, (1, 2), 0))
    assert (
        "0 + 2 pages were reserved, the request has 3" in pair.p.last(handoff_events.Reroute).reason
    )


def test_pages_of_another_content_are_not_adopted():
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.prefill()
    for write in pair.p.all(handoff_events.WriteKv):
        pair.send(pair.p, handoff_events.WriteDone(write.op, "", checksum=5))
    pair.deliver_all()
    verify = pair.d.last(handoff_events.VerifyPages)
    assert (verify.pages, verify.checksum) == ((1, 2, 3), 5)
    pair.send(pair.d, handoff_events.PagesVerified(verify.generation, False))
    assert outcome(pair.d) is HandoffOutcome.FAILED and not pair.d.events_for_engine(ResumeDecode)
    pair.deliver_all()
    assert pair.p.all(handoff_events.Reroute)


def test_a_missing_write_is_noticed():
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.deliver_all()
    pair.send(pair.d, wire.TransferDone(ID, 1, 2, 1, wire.SampledToken(77), 11, None))
    assert (
        outcome(pair.d) is HandoffOutcome.FAILED
        and "11 page layers were written, not 12" in pair.d.last(handoff_events.HandoffEnded).reason
    )


def test_a_request_that_the_prefill_engine_refuses():
    pair = Pair()
    pair.send(pair.p, handoff_events.StartHandoff(ID, make_request(), 1, 60.0))
    pair.send(pair.p, OutputDelta(P_NAME, finish_reason=FinishReason.ERROR, error="too long"))
    pair.deliver_all()
    assert (
        outcome(pair.p) is HandoffOutcome.FAILED
        and not pair.d.events_for_engine(AddRequest)
        and pair.is_empty()
    )


def test_a_request_that_the_decode_engine_refuses_is_rerouted():
    pair = Pair()
    pair.start()
    pair.deliver_all()
    pair.send(pair.d, OutputDelta(D_NAME, finish_reason=FinishReason.ERROR, error="too long"))
    pair.deliver_all()
    assert pair.p.last(handoff_events.Reroute).reason == "too long" and pair.d.handoffs.idle


@pytest.mark.parametrize("why", ["draining", "quarantine"])
def test_offers_are_refused(why):
    pair = Pair(max_quarantine_pages=0)
    if why == "draining":
        pair.send(pair.d, handoff_events.Drain(True))
    else:
        pair.d.handoffs.ledger.hold("earlier", PageHold.RECEIVING, (9,))
        pair.d.handoffs.ledger.change_hold("earlier", PageHold.QUARANTINE)
    pair.start()
    pair.deliver_all()
    assert pair.p.all(handoff_events.Reroute) and not pair.d.events_for_engine(AddRequest)


# ---------------------------------------------------------------- workers die and links fall silent


def test_the_prefill_worker_is_lost_with_writes_in_flight():
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.prefill()
    pair.send(pair.d, handoff_events.LinkDown(2))
    assert outcome(pair.d) is HandoffOutcome.FAILED and not pair.d.events_for_engine(Release)
    pair.send(pair.d, handoff_events.LinkFenced(2))
    assert (
        pair.d.events_for_engine(Release) == [Release(D_NAME)]
        and pair.d.handoffs.idle
        and pair.d.handoffs.ledger.is_empty
    )


def test_the_decode_worker_is_lost_and_another_takes_over_without_a_second_prefill():
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.prefill()
    pair.send(pair.p, handoff_events.LinkDown(1))
    reroute = pair.p.last(handoff_events.Reroute)
    assert (reroute.source, reroute.handoff) == (ID, ID)
    pair.drop_messages()
    second = HandoffId("r", 2)
    other = Pair()
    pair.d = other.d
    pair.send(pair.d, handoff_events.LinkUp(4, 3, "prefill worker", DisaggRole.DECODE))
    pair.send(pair.p, handoff_events.LinkUp(3, 4, "another", DisaggRole.PREFILL))
    pair.send(pair.p, handoff_events.Redirect(ID, second, 3))
    pair.deliver_all()
    pair.send(pair.d, Admitted(handoff_events.engine_id(second, DisaggRole.DECODE), (4, 5, 6), 0))
    pair.deliver_all()
    pair.send(pair.p, handoff_events.LinkFenced(1))
    pair.complete_writes()
    pair.deliver_all()
    assert len(pair.p.events_for_engine(AddRequest)) == 1, "it was prefilled once"
    assert outcome(pair.p) is HandoffOutcome.SENT and outcome(pair.d) is HandoffOutcome.ADOPTED
    assert pair.p.events_for_engine(Release) == [Release(P_NAME)] and pair.is_empty()


def test_pages_stay_while_the_write_to_a_lost_worker_is_in_flight():
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.prefill()
    pair.send(pair.p, handoff_events.LinkDown(1))
    pair.send(pair.p, handoff_events.SettleSource(ID, "nobody"))
    assert not pair.p.events_for_engine(Release)
    pair.send(pair.p, handoff_events.LinkFenced(1))
    assert pair.p.events_for_engine(Release) == [Release(P_NAME)] and pair.p.handoffs.idle


def test_silence_kills_a_link_for_ever():
    pair = Pair()
    pair.start()
    pair.reserve()
    for _ in range(40):
        pair.wait(0.1, carry=False)
        lost = pair.drop_messages()
    assert pair.p.all(handoff_events.FenceLink) and pair.d.all(handoff_events.FenceLink)
    assert pair.p.all(handoff_events.Reroute) and outcome(pair.d) is HandoffOutcome.FAILED
    pair.send(pair.d, wire.LinkHeartbeat(1, 2))
    assert pair.d.handoffs.unexpected == 1 and lost is not None


def test_heartbeats_keep_a_quiet_link_and_a_queued_handoff():
    pair = Pair(park_timeout_s=1000.0)
    pair.start(deadline_s=500.0)
    pair.deliver_all()
    pair.prefill()
    pair.wait(60)
    assert not pair.p.all(handoff_events.Reroute) and not pair.p.all(handoff_events.FenceLink)
    assert pair.p.handoffs.ledger.pages(PageHold.PARKED) == 3


def test_an_offer_that_is_never_named_is_rerouted_when_its_lease_ends():
    pair = Pair(lease_s=2.0)
    pair.start()
    pair.drop_messages()
    for _ in range(30):
        pair.wait(0.1, carry=False)
        for beat in [m for m in pair.drop_messages() if isinstance(m, wire.LinkHeartbeat)]:
            pair.send(pair.p if beat.destination == 1 else pair.d, beat)
    assert "has not named the handoff for 2.0 s" in pair.p.last(handoff_events.Reroute).reason


def test_a_failed_write_is_rerouted():
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.prefill()
    pair.complete_writes("connection reset")
    assert "connection reset" in pair.p.last(handoff_events.Reroute).reason
    pair.deliver_all()
    assert pair.d.events_for_engine(Release) and not pair.d.events_for_engine(ResumeDecode)


def test_a_start_without_a_link_fails_at_once():
    pair = Pair()
    pair.send(pair.p, handoff_events.StartHandoff(ID, make_request(), 7, 60.0))
    assert (
        outcome(pair.p) is HandoffOutcome.FAILED
        and not pair.p.events_for_engine(AddRequest)
        and pair.p.handoffs.idle
    )
    pair.start()
    pair.send(pair.p, handoff_events.LinkDown(1))
    pair.send(pair.p, handoff_events.Redirect(ID, HandoffId("r", 2), 7))
    assert pair.p.last(handoff_events.Reroute).handoff == HandoffId("r", 2)


def test_withdrawing_what_was_adopted_reaches_the_engine():
    pair = Pair()
    pair.start()
    pair.reserve()
    pair.prefill()
    pair.complete_writes()
    pair.deliver_all()
    pair.send(pair.d, handoff_events.WithdrawRequest(ID))
    assert Abort(D_NAME) in pair.d.events_for_engine(Abort)


def test_clocks_need_not_agree():
    pair = Pair()
    pair.start(deadline_s=2.0)
    offer = pair.drop_messages()[0]
    assert offer.deadline_s == pytest.approx(2.0)
    pair.d.handoffs.links[2].last_heard_s = 1e6
    pair.d.handoffs.on_event(1e6, offer)
    pair.d.handoffs.tick(1e6 + 1.9)
    assert next(iter(pair.d.handoffs.receivers.values())).is_active
    pair.d.handoffs.tick(1e6 + 2.1)
    assert not next(iter(pair.d.handoffs.receivers.values())).is_active
