"""One request through the pool: which attempt counts, and what the client gets."""

from __future__ import annotations

import pytest
from engine_pair import make_request

from counterpoint.disagg.dispatch import (
    CancelAttempt,
    DecodeInPlace,
    DeliverPromptLogprobs,
    DeliverTokens,
    OnLoss,
    ReleaseSource,
    RequestDispatch,
    RequestFinished,
    Restart,
    RetryDecode,
)
from counterpoint.disagg.handoff_events import HandoffEnded, HandoffOutcome, Reroute
from counterpoint.disagg.messages import HandoffId, SampledToken
from counterpoint.types import AddRequest, DisaggRole, FinishReason, Sampling, TokenLogprobs

A1, A2 = HandoffId("r", 1), HandoffId("r", 2)
END = RequestFinished(FinishReason.LENGTH)


def tokens(*ids: int) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(id) for id in ids)


def started(**kwargs) -> RequestDispatch:
    dispatch = RequestDispatch(make_request(), **kwargs)
    assert dispatch.start() == [Restart(A1, dispatch.request)]
    dispatch.assign("p", "d")
    return dispatch


def test_tokens_of_both_workers_make_one_answer():
    dispatch = started()
    assert dispatch.on_tokens(A1, DisaggRole.PREFILL, 0, tokens(5)) == [DeliverTokens(0, tokens(5))]
    assert (
        dispatch.on_ended(
            HandoffEnded(A1, DisaggRole.DECODE, HandoffOutcome.ADOPTED, first_token=SampledToken(5))
        )
        == []
    )
    assert dispatch.on_tokens(A1, DisaggRole.DECODE, 1, tokens(6, 7)) == [
        DeliverTokens(1, tokens(6, 7))
    ]
    assert dispatch.on_tokens(A1, DisaggRole.DECODE, 3, tokens(8), END) == [
        DeliverTokens(3, tokens(8)),
        END,
    ]
    assert dispatch.is_over


def test_tokens_that_overtake_the_first_wait_for_it():
    dispatch = started()
    assert dispatch.on_tokens(A1, DisaggRole.DECODE, 1, tokens(6), END) == []
    assert dispatch.on_tokens(A1, DisaggRole.PREFILL, 0, tokens(5)) == [
        DeliverTokens(0, tokens(5, 6)),
        END,
    ]


def test_the_first_token_also_comes_with_the_adoption():
    dispatch = started()
    first = SampledToken(5, None, 8)
    assert dispatch.on_ended(
        HandoffEnded(A1, DisaggRole.DECODE, HandoffOutcome.ADOPTED, first_token=first)
    ) == [DeliverTokens(0, (first,))]
    assert dispatch.on_tokens(A1, DisaggRole.PREFILL, 0, tokens(5)) == []


def asked_about() -> RequestDispatch:
    """Of a prompt of three tokens, two are to be told of."""
    sampling = Sampling(max_tokens=4, prompt_logprobs=0)
    dispatch = RequestDispatch(AddRequest(id="r", prompt=(1, 2, 3), sampling=sampling), retries=1)
    dispatch.start()
    dispatch.assign("p", "d")
    return dispatch


ABOUT = (TokenLogprobs(-1.0), TokenLogprobs(-2.0))


def test_tokens_that_overtake_what_is_told_of_the_prompt_wait_for_it():
    dispatch = asked_about()
    assert dispatch.on_prompt_logprobs(A1, DisaggRole.PREFILL, ABOUT[:1]) == [
        DeliverPromptLogprobs(ABOUT[:1])
    ]
    assert (
        dispatch.on_ended(
            HandoffEnded(A1, DisaggRole.DECODE, HandoffOutcome.ADOPTED, first_token=SampledToken(5))
        )
        == []
    )
    assert dispatch.on_tokens(A1, DisaggRole.DECODE, 1, tokens(6), END) == []
    assert dispatch.on_prompt_logprobs(A1, DisaggRole.PREFILL, ABOUT[1:]) == [
        DeliverPromptLogprobs(ABOUT[1:]),
        DeliverTokens(0, tokens(5, 6)),
        END,
    ]


def test_a_prefill_worker_that_is_lost_before_it_has_told_all_is_replaced():
    dispatch = asked_about()
    dispatch.on_prompt_logprobs(A1, DisaggRole.PREFILL, ABOUT[:1])
    dispatch.on_ended(
        HandoffEnded(A1, DisaggRole.DECODE, HandoffOutcome.ADOPTED, first_token=SampledToken(5))
    )
    assert dispatch.on_worker_lost("p")[-1] == Restart(A2, dispatch.request, "p")
    dispatch.assign("q", "d")
    assert dispatch.on_prompt_logprobs(A2, DisaggRole.PREFILL, ABOUT) == [
        DeliverPromptLogprobs(ABOUT[1:])
    ], "the client knows the first"


def test_an_error_waits_for_nothing():
    error = RequestFinished(FinishReason.ERROR, "too long")
    assert asked_about().on_tokens(A1, DisaggRole.PREFILL, 0, (), error) == [error]


def test_one_token_may_be_all():
    dispatch = started()
    assert dispatch.on_tokens(A1, DisaggRole.PREFILL, 0, tokens(5), END) == [
        DeliverTokens(0, tokens(5)),
        END,
    ]
    assert dispatch.on_ended(HandoffEnded(A1, DisaggRole.PREFILL, HandoffOutcome.FINISHED)) == []


def test_a_bad_request_ends_with_the_prefill_workers_words():
    error = RequestFinished(FinishReason.ERROR, "too long")
    assert started().on_tokens(A1, DisaggRole.PREFILL, 0, (), error) == [error]


def test_a_failed_handoff_goes_elsewhere_then_stays():
    dispatch = started(retries=1)
    dispatch.on_tokens(A1, DisaggRole.PREFILL, 0, tokens(5))
    assert dispatch.on_reroute(Reroute(A1, A1, "full")) == [
        CancelAttempt("d", A1),
        RetryDecode("p", A1, A2, "d"),
    ]
    dispatch.assign("p", "e")
    assert dispatch.on_tokens(A1, DisaggRole.DECODE, 1, tokens(99)) == [], (
        "the attempt was given up"
    )
    assert dispatch.on_reroute(Reroute(A1, A2, "full")) == [
        CancelAttempt("e", A2),
        DecodeInPlace("p", A1),
    ]
    assert dispatch.on_tokens(A1, DisaggRole.PREFILL, 1, tokens(6), END) == [
        DeliverTokens(1, tokens(6)),
        END,
    ]


def test_with_nobody_else_it_stays():
    dispatch = started()
    dispatch.on_reroute(Reroute(A1, A1, "full"))
    assert dispatch.on_no_worker() == [DecodeInPlace("p", A1)]


def test_where_it_may_not_stay_it_fails():
    dispatch = started(retries=0, decode_in_place=False)
    actions = dispatch.on_reroute(Reroute(A1, A1, "full"))
    assert ReleaseSource("p", A1, "full") in actions and actions[-1] == RequestFinished(
        FinishReason.ERROR, "full", worker_lost=True
    )


def test_nobody_at_all():
    dispatch = RequestDispatch(make_request())
    dispatch.start()
    assert dispatch.on_no_worker() == [
        RequestFinished(FinishReason.ERROR, "no worker can take the request", worker_lost=True)
    ]


def test_what_was_adopted_is_not_rerouted():
    dispatch = started()
    dispatch.on_ended(
        HandoffEnded(A1, DisaggRole.DECODE, HandoffOutcome.ADOPTED, first_token=SampledToken(5))
    )
    assert dispatch.on_reroute(Reroute(A1, A1, "silent")) == [
        ReleaseSource("p", A1, "decided otherwise")
    ]
    assert (
        dispatch.on_ended(
            HandoffEnded(A1, DisaggRole.PREFILL, HandoffOutcome.ABORTED, "decided otherwise")
        )
        == []
    )
    assert dispatch.on_tokens(A1, DisaggRole.DECODE, 1, tokens(6)) == [DeliverTokens(1, tokens(6))]


def test_a_lost_prefill_worker_before_any_token():
    dispatch = started()
    actions = dispatch.on_worker_lost("p")
    assert actions == [
        CancelAttempt("p", A1),
        CancelAttempt("d", A1),
        Restart(A2, dispatch.request, "p"),
    ]
    dispatch.assign("q", "d")
    assert dispatch.on_tokens(A1, DisaggRole.DECODE, 1, tokens(6)) == []
    assert dispatch.on_tokens(A2, DisaggRole.PREFILL, 0, tokens(5)) == [DeliverTokens(0, tokens(5))]


@pytest.mark.parametrize("on_loss", OnLoss)
def test_a_worker_lost_behind_a_token(on_loss):
    dispatch = started(on_loss=on_loss)
    dispatch.on_tokens(A1, DisaggRole.PREFILL, 0, tokens(5))
    dispatch.on_ended(HandoffEnded(A1, DisaggRole.PREFILL, HandoffOutcome.SENT))
    dispatch.on_tokens(A1, DisaggRole.DECODE, 1, tokens(6))
    assert dispatch.on_worker_lost("p") == [], "its part is done"
    last = dispatch.on_worker_lost("d")[-1]
    if on_loss is OnLoss.FAIL:
        assert isinstance(last, RequestFinished) and last.finish is FinishReason.ERROR
        return
    assert isinstance(last, Restart) and last.request.generated_prefix == (5, 6)
    dispatch.assign("p", "e")
    assert dispatch.on_tokens(A2, DisaggRole.PREFILL, 0, tokens(7)) == [DeliverTokens(2, tokens(7))]
    assert dispatch.on_tokens(A2, DisaggRole.DECODE, 1, tokens(8), END) == [
        DeliverTokens(3, tokens(8)),
        END,
    ]


def test_a_decode_worker_that_dies_after_adopting_unheard():
    dispatch = started(on_loss=OnLoss.RECOMPUTE)
    dispatch.on_tokens(A1, DisaggRole.PREFILL, 0, tokens(5))
    assert dispatch.on_worker_lost("d") == [], (
        "the prefill worker will say Reroute, or that it was taken"
    )
    assert isinstance(
        dispatch.on_ended(HandoffEnded(A1, DisaggRole.PREFILL, HandoffOutcome.SENT))[-1], Restart
    )


def test_a_lost_worker_where_it_stays():
    dispatch = started(retries=0)
    dispatch.on_reroute(Reroute(A1, A1, "full"))
    assert dispatch.on_worker_lost("p")[-1].finish is FinishReason.ERROR


def test_retries_are_bounded():
    dispatch = started(retries=2)
    for _ in range(2):
        assert isinstance(dispatch.on_worker_lost("p")[-1], Restart)
        dispatch.assign("p", "d")
    assert dispatch.on_worker_lost("p")[-1] == RequestFinished(
        FinishReason.ERROR, "worker p was lost", worker_lost=True
    )
    assert dispatch.on_worker_lost("p") == []


def test_a_client_that_leaves_takes_both_workers_with_it():
    dispatch = started()
    assert dispatch.abort() == [CancelAttempt("p", A1), CancelAttempt("d", A1)]
    assert dispatch.on_tokens(A1, DisaggRole.PREFILL, 0, tokens(5)) == [] and dispatch.abort() == []
