"""The state that policies read."""

from __future__ import annotations

from counterpoint.core.state import MIN_REMAINING, OutputLengths


def test_likely_remaining_tokens_follow_the_latest_outputs():
    answers = OutputLengths()
    assert answers.likely_remaining(3) == MIN_REMAINING, "it may end any time"
    assert answers.likely_remaining(400) == 100
    for i in range(300):
        answers.add(1000 if i < 44 else 10 + i % 10)  # the first ones are forgotten
    assert answers.likely_remaining(0) in (11, 12)
    assert answers.likely_remaining(19) == MIN_REMAINING
