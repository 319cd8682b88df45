"""Three real processes over shared memory, TCP and sharded pools; signals at every named point."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import msgspec
import psutil
import pytest
from worker_processes import DIGEST, Cluster, Member

from counterpoint.disagg.handoff_events import HandoffEnded, HandoffOutcome, Reroute
from counterpoint.types import DisaggRole, OutputDelta


@pytest.fixture(scope="module", params=["shm", "tcp", "cut tcp"])
def cluster(request) -> Iterator[Cluster]:
    files = set(os.listdir("/dev/shm"))
    children = set(psutil.Process().children(recursive=True))
    cluster = Cluster(request.param)
    yield cluster
    cluster.close()
    assert set(os.listdir("/dev/shm")) <= files, "a shared-memory file was left"
    left = [
        c
        for c in psutil.Process().children(recursive=True)
        if c not in children and "resource_tracker" not in " ".join(c.cmdline())
    ]
    assert not left, f"orphans: {left}"


@pytest.fixture(autouse=True)
def calm(cluster: Cluster) -> Iterator[None]:
    """Every test starts with three willing workers and ends with nothing left on any of them."""
    cluster.reports.clear()
    cluster.avoid.clear()
    cluster.restore_workers()
    yield
    cluster.restore_workers()
    cluster.wait_for_rest()


names = iter(range(10_000))


def new_id() -> str:
    return f"r{next(names)}"


def test_answers_are_whole(cluster):
    ids = [new_id() for _ in range(8)]
    for number, id in enumerate(ids):
        cluster.submit(id, tokens=5 + 7 * number % 40, max_tokens=1 + number % 5)
    cluster.wait_until(lambda: all(cluster.ended(id) for id in ids))
    for id in ids:
        cluster.check_answer(id)
    assert cluster.has_reported("d", HandoffEnded, outcome=HandoffOutcome.ADOPTED), (
        "nothing was handed over"
    )


def test_a_client_leaves_while_kv_is_sent(cluster):
    id = new_id()
    cluster.hold("p", prefills=3)
    cluster.submit(id)
    cluster.wait_for_state("reserved", id)
    cluster.frontend.abort(id)
    cluster.dispatch_pending()
    cluster.wait_until(
        lambda: (
            cluster.has_reported("d", HandoffEnded, outcome=HandoffOutcome.ABORTED)
            and cluster.has_reported("p", HandoffEnded, outcome=HandoffOutcome.ABORTED)
        )
    )


# point -> (which worker is held, and how): the handoff stands still there
POINTS = {
    "queued": (
        {
            "d": {"closed": (DisaggRole.DECODE,)},
            "e": {"closed": (DisaggRole.DECODE,)},
            "p": {"prefills": 3},
        }
    ),
    "reserved": ({"p": {"prefills": 3}}),
    "parked": ({"d": {"closed": (DisaggRole.DECODE,)}, "e": {"closed": (DisaggRole.DECODE,)}}),
    "decoding": ({"d": {"decodes": False}}),
}


def stand_at(cluster: Cluster, point: str) -> str:
    id = new_id()
    for name, hold in POINTS[point].items():
        cluster.hold(name, **hold)
    cluster.submit(id)
    cluster.wait_for_state(point, id)
    return id


def let_go(cluster: Cluster, *names: str) -> None:
    for name in names:
        cluster.hold(name)


@pytest.mark.parametrize("point", POINTS)
def test_the_decode_worker_is_killed(cluster, point):
    id = stand_at(cluster, point)
    cluster.kill("d")
    cluster.avoid.add("d")
    cluster.frontend.on_worker_lost("d")
    cluster.dispatch_pending()
    let_go(cluster, "p", "e")
    cluster.wait_until(lambda: cluster.ended(id))
    cluster.check_answer(id)
    prefilled = {
        words.id
        for _, words in cluster.reports
        if isinstance(words, OutputDelta) and words.id.endswith("prefill")
    }
    assert len(prefilled) == (2 if point == "decoding" else 1), "the prefill was not kept"
    cluster.restart("d")
    again = new_id()
    cluster.avoid.clear()
    cluster.submit(again)
    cluster.wait_until(lambda: cluster.ended(again))
    cluster.check_answer(again)
    assert cluster.has_reported("d", HandoffEnded, outcome=HandoffOutcome.ADOPTED), (
        "the restarted worker gets no work"
    )


@pytest.mark.parametrize("point", POINTS)
def test_the_prefill_worker_is_killed(cluster, point):
    id = stand_at(cluster, point)
    cluster.kill("p")
    cluster.avoid.add("p")
    cluster.frontend.on_worker_lost("p")
    cluster.dispatch_pending()
    if point != "decoding":
        cluster.wait_until(
            lambda: cluster.has_reported("d", HandoffEnded, disagg_role=DisaggRole.DECODE)
        )
        receiving = {"queued", "reserved", "verifying", "aborting"}
        cluster.wait_until(lambda: receiving.isdisjoint(cluster.leftovers("d")["states"]))
    let_go(cluster, "d", "e")
    cluster.wait_until(lambda: cluster.ended(id))
    cluster.check_answer(id)
    cluster.restart("p")
    again = new_id()
    cluster.avoid.clear()
    cluster.submit(again)
    cluster.wait_until(lambda: cluster.ended(again))
    cluster.check_answer(again)


@pytest.mark.parametrize("point", POINTS)
def test_the_decode_worker_stands_still(cluster, point):
    id = stand_at(cluster, point)
    cluster.members["d"].signal(signal.SIGSTOP)
    cluster.avoid.add("d")
    let_go(cluster, "p", "e")
    if point == "decoding":
        cluster.frontend.on_worker_lost(
            "d"
        )  # what the front does when its own connection is silent
        cluster.dispatch_pending()
    else:
        cluster.wait_until(lambda: cluster.has_reported("p", Reroute))
    cluster.wait_until(lambda: cluster.ended(id))
    cluster.check_answer(id)
    cluster.wait_for_rest("pe")
    cluster.members["d"].signal(signal.SIGCONT)


@pytest.mark.parametrize("point", POINTS)
def test_the_prefill_worker_stands_still(cluster, point):
    id = stand_at(cluster, point)
    cluster.members["p"].signal(signal.SIGSTOP)
    cluster.avoid.add("p")
    if point != "decoding":
        cluster.wait_until(
            lambda: cluster.has_reported(
                "d", HandoffEnded, disagg_role=DisaggRole.DECODE, outcome=HandoffOutcome.FAILED
            )
        )
    cluster.frontend.on_worker_lost("p")
    cluster.dispatch_pending()
    let_go(cluster, "d", "e")
    cluster.wait_until(lambda: cluster.ended(id))
    cluster.check_answer(id)
    cluster.members["p"].signal(signal.SIGCONT)


@pytest.mark.parametrize("field", ["weights", "kv_dtype"])
def test_a_worker_of_another_model_is_refused(cluster, field):
    odd = Member("odd", cluster.kind, digest=msgspec.structs.replace(DIGEST, **{field: "another"}))
    cluster.members["odd"] = odd
    cluster.wait_until(lambda: odd.address is not None)
    cluster.avoid |= {"d", "e"}
    id = new_id()
    cluster.submit(id)
    cluster.wait_until(lambda: cluster.ended(id) or cluster.has_reported("p", HandoffEnded))
    assert not cluster.has_reported("odd", HandoffEnded, outcome=HandoffOutcome.ADOPTED)
    del cluster.members["odd"]
    odd.close()
