"""One request's way through the pools: which attempt counts, and what the client gets."""

from __future__ import annotations

import pytest
from pair import arrive

from counterpoint.cluster.dispatch import About, Again, Deliver, Dispatch, Drop, Elsewhere, Finished, Keep, LetGo, OnLoss
from counterpoint.cluster.messages import HandoffId, Sampled
from counterpoint.cluster.nouns import Ended, Outcome, Reroute
from counterpoint.types import Arrive, Finish, Part, Sampling, TokenLogprobs

A1, A2 = HandoffId("r", 1), HandoffId("r", 2)
END = Finished(Finish.LENGTH)


def tokens(*ids: int) -> tuple[Sampled, ...]:
    return tuple(Sampled(id) for id in ids)


def started(**kwargs) -> Dispatch:
    dispatch = Dispatch(arrive(), **kwargs)
    assert dispatch.begin() == [Again(A1, dispatch.arrive)]
    dispatch.sent_to("p", "d")
    return dispatch


def test_tokens_of_both_workers_make_one_answer():
    dispatch = started()
    assert dispatch.took(A1, Part.PREFILL, 0, tokens(5)) == [Deliver(0, tokens(5))]
    assert dispatch.ended(Ended(A1, Part.DECODE, Outcome.ADOPTED, first=Sampled(5))) == []
    assert dispatch.took(A1, Part.DECODE, 1, tokens(6, 7)) == [Deliver(1, tokens(6, 7))]
    assert dispatch.took(A1, Part.DECODE, 3, tokens(8), END) == [Deliver(3, tokens(8)), END]
    assert dispatch.over


def test_tokens_that_overtake_the_first_wait_for_it():
    dispatch = started()
    assert dispatch.took(A1, Part.DECODE, 1, tokens(6), END) == []
    assert dispatch.took(A1, Part.PREFILL, 0, tokens(5)) == [Deliver(0, tokens(5, 6)), END]


def test_the_first_token_also_comes_with_the_adoption():
    dispatch = started()
    first = Sampled(5, None, 8)
    assert dispatch.ended(Ended(A1, Part.DECODE, Outcome.ADOPTED, first=first)) == [Deliver(0, (first,))]
    assert dispatch.took(A1, Part.PREFILL, 0, tokens(5)) == []


def asked_about() -> Dispatch:
    """Of a prompt of three tokens, two are to be told of."""
    sampling = Sampling(max_tokens=4, prompt_logprobs=0)
    dispatch = Dispatch(Arrive(id="r", prompt=(1, 2, 3), sampling=sampling), retries=1)
    dispatch.begin()
    dispatch.sent_to("p", "d")
    return dispatch


ABOUT = (TokenLogprobs(-1.0), TokenLogprobs(-2.0))


def test_tokens_that_overtake_what_is_told_of_the_prompt_wait_for_it():
    dispatch = asked_about()
    assert dispatch.told(A1, Part.PREFILL, ABOUT[:1]) == [About(ABOUT[:1])]
    assert dispatch.ended(Ended(A1, Part.DECODE, Outcome.ADOPTED, first=Sampled(5))) == []
    assert dispatch.took(A1, Part.DECODE, 1, tokens(6), END) == []
    assert dispatch.told(A1, Part.PREFILL, ABOUT[1:]) == [About(ABOUT[1:]), Deliver(0, tokens(5, 6)), END]


def test_a_prefill_worker_that_is_lost_before_it_has_told_all_is_replaced():
    dispatch = asked_about()
    dispatch.told(A1, Part.PREFILL, ABOUT[:1])
    dispatch.ended(Ended(A1, Part.DECODE, Outcome.ADOPTED, first=Sampled(5)))
    assert dispatch.lost("p")[-1] == Again(A2, dispatch.arrive, "p")
    dispatch.sent_to("q", "d")
    assert dispatch.told(A2, Part.PREFILL, ABOUT) == [About(ABOUT[1:])], "the client knows the first"


def test_an_error_waits_for_nothing():
    error = Finished(Finish.ERROR, "too long")
    assert asked_about().took(A1, Part.PREFILL, 0, (), error) == [error]


def test_one_token_may_be_all():
    dispatch = started()
    assert dispatch.took(A1, Part.PREFILL, 0, tokens(5), END) == [Deliver(0, tokens(5)), END]
    assert dispatch.ended(Ended(A1, Part.PREFILL, Outcome.FINISHED)) == []


def test_a_bad_request_ends_with_the_prefill_workers_words():
    error = Finished(Finish.ERROR, "too long")
    assert started().took(A1, Part.PREFILL, 0, (), error) == [error]


def test_a_failed_handoff_goes_elsewhere_then_stays():
    dispatch = started(retries=1)
    dispatch.took(A1, Part.PREFILL, 0, tokens(5))
    assert dispatch.rerouted(Reroute(A1, A1, "full")) == [Drop("d", A1), Elsewhere("p", A1, A2, "d")]
    dispatch.sent_to("p", "e")
    assert dispatch.took(A1, Part.DECODE, 1, tokens(99)) == [], "the attempt was given up"
    assert dispatch.rerouted(Reroute(A1, A2, "full")) == [Drop("e", A2), Keep("p", A1)]
    assert dispatch.took(A1, Part.PREFILL, 1, tokens(6), END) == [Deliver(1, tokens(6)), END]


def test_with_nobody_else_it_stays():
    dispatch = started()
    dispatch.rerouted(Reroute(A1, A1, "full"))
    assert dispatch.no_worker() == [Keep("p", A1)]


def test_where_it_may_not_stay_it_fails():
    dispatch = started(retries=0, may_stay=False)
    actions = dispatch.rerouted(Reroute(A1, A1, "full"))
    assert LetGo("p", A1, "full") in actions and actions[-1] == Finished(Finish.ERROR, "full", lost=True)


def test_nobody_at_all():
    dispatch = Dispatch(arrive())
    dispatch.begin()
    assert dispatch.no_worker() == [Finished(Finish.ERROR, "no worker can take the request", lost=True)]


def test_what_was_adopted_is_not_rerouted():
    dispatch = started()
    dispatch.ended(Ended(A1, Part.DECODE, Outcome.ADOPTED, first=Sampled(5)))
    assert dispatch.rerouted(Reroute(A1, A1, "silent")) == [LetGo("p", A1, "decided otherwise")]
    assert dispatch.ended(Ended(A1, Part.PREFILL, Outcome.ABORTED, "decided otherwise")) == []
    assert dispatch.took(A1, Part.DECODE, 1, tokens(6)) == [Deliver(1, tokens(6))]


def test_a_lost_prefill_worker_before_any_token():
    dispatch = started()
    actions = dispatch.lost("p")
    assert actions == [Drop("p", A1), Drop("d", A1), Again(A2, dispatch.arrive, "p")]
    dispatch.sent_to("q", "d")
    assert dispatch.took(A1, Part.DECODE, 1, tokens(6)) == []
    assert dispatch.took(A2, Part.PREFILL, 0, tokens(5)) == [Deliver(0, tokens(5))]


@pytest.mark.parametrize("on_loss", OnLoss)
def test_a_worker_lost_behind_a_token(on_loss):
    dispatch = started(on_loss=on_loss)
    dispatch.took(A1, Part.PREFILL, 0, tokens(5))
    dispatch.ended(Ended(A1, Part.PREFILL, Outcome.SENT))
    dispatch.took(A1, Part.DECODE, 1, tokens(6))
    assert dispatch.lost("p") == [], "its part is done"
    last = dispatch.lost("d")[-1]
    if on_loss is OnLoss.FAIL:
        assert isinstance(last, Finished) and last.finish is Finish.ERROR
        return
    assert isinstance(last, Again) and last.arrive.resumed == (5, 6)
    dispatch.sent_to("p", "e")
    assert dispatch.took(A2, Part.PREFILL, 0, tokens(7)) == [Deliver(2, tokens(7))]
    assert dispatch.took(A2, Part.DECODE, 1, tokens(8), END) == [Deliver(3, tokens(8)), END]


def test_a_decode_worker_that_dies_after_adopting_unheard():
    dispatch = started(on_loss=OnLoss.RECOMPUTE)
    dispatch.took(A1, Part.PREFILL, 0, tokens(5))
    assert dispatch.lost("d") == [], "the prefill worker will say Reroute, or that it was taken"
    assert isinstance(dispatch.ended(Ended(A1, Part.PREFILL, Outcome.SENT))[-1], Again)


def test_a_lost_worker_where_it_stays():
    dispatch = started(retries=0)
    dispatch.rerouted(Reroute(A1, A1, "full"))
    assert dispatch.lost("p")[-1].finish is Finish.ERROR


def test_retries_are_bounded():
    dispatch = started(retries=2)
    for _ in range(2):
        assert isinstance(dispatch.lost("p")[-1], Again)
        dispatch.sent_to("p", "d")
    assert dispatch.lost("p")[-1] == Finished(Finish.ERROR, "worker p was lost", lost=True)
    assert dispatch.lost("p") == []


def test_a_client_that_leaves_takes_both_workers_with_it():
    dispatch = started()
    assert dispatch.withdrawn() == [Drop("p", A1), Drop("d", A1)]
    assert dispatch.took(A1, Part.PREFILL, 0, tokens(5)) == [] and dispatch.withdrawn() == []
