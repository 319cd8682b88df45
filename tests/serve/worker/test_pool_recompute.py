"""`--on-loss recompute`: a worker is killed at every state of a handoff, and no answer is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from held_pool import STATES, asked, ends_whole, held_pool
from pool_process import text_of
from serve_process import poll


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_with_recompute_every_answer_goes_on(tmp_path: Path, role: str):
    """A client that has tokens already gets the rest of the same answer from another worker."""
    with held_pool(tmp_path, on_loss="recompute") as pool:
        whole = text_of(asked(pool).end())
        for state, (points, _, _) in STATES.items():
            pool.hold(*points)
            stream = asked(pool)
            decode = pool.at(state)
            worker = "prefill-0" if role == "prefill" else decode
            pool.worker(worker).kill()
            poll(
                lambda worker=worker: not pool.metric("counterpoint_worker_up", worker=worker),
                what="nobody has noticed",
            )
            pool.let_go()
            ends_whole(stream, whole)
            poll(pool.well, 60, "a worker does not come back")
            poll(lambda: pool.at_rest, 20, "something is still held")
        places = re.findall(r"worker (\S+) \(\w+\) is ready at (\S+):", pool.said())
        assert len(places) > 4 and len(set(places)) == 3, (
            "a worker does not come back to its address"
        )
