"""The contract checker accepts a right command sequence and stops every wrong one."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from sim_builders import LANES, Constant, init_slot, make_step

from counterpoint.core.limits import EngineLimits
from counterpoint.device.contract_checker import ContractChecker, ContractViolation
from counterpoint.device.sim import SimExecutor, VirtualEventQueue, simulated_token
from counterpoint.types import Command, DiscardPass, FreeSlot, Segment, Step

DONE = "done"  # in a script: wait for the next completion
Script = list[Command | str]


def play(script: Script, overlap: bool = False) -> ContractChecker:
    """Units 4, layers 4, 8 pages of 4 tokens, two lanes of depth 2."""
    inbox = VirtualEventQueue()
    executor = SimExecutor(Constant(slower=1.0), inbox, layers=4)
    limits = EngineLimits(
        pages=8,
        page_tokens=4,
        max_running=8,
        max_context_tokens=32,
        max_pass_tokens=32,
        eos_token_ids=(),
        units=4,
        layers=4,
        overlap=overlap,
    )
    watch = ContractChecker(executor, inbox, limits, LANES)
    for command in script:
        if isinstance(command, str):
            watch.get()
        else:
            watch.submit(command)
    return watch


PREFILL = make_step(1, Segment(0, 0, 8, True, (0, 1)))
DECODE = make_step(2, Segment(0, 8, 1, True, (2,)), decodes=1)


def test_a_whole_life_passes():
    watch = play(
        [
            init_slot(0),
            PREFILL,
            DECODE,  # one step ahead: the token it needs is still being sampled
            DONE,
            DONE,
            init_slot(1, tokens=11, pages=(0, 1)),  # shares the prompt's pages
            make_step(3, Segment(1, 8, 2, False, (3,)), lane=1, batch=3, layers=(0, 1)),
            make_step(4, Segment(0, 9, 1, True), decodes=1),
            make_step(5, Segment(1, 8, 2, False, (3,)), lane=1, batch=3, layers=(1, 4)),
            DONE,
            DONE,
            FreeSlot(0),
            DONE,
            make_step(6, Segment(1, 10, 1, True), lane=1),
            DONE,
            FreeSlot(1),
        ]
    )
    watch.check_idle()


def test_a_generated_page_is_shared_by_its_content():
    answer = [simulated_token(0, position) for position in range(8, 12)]
    life: Script = [init_slot(0), PREFILL, DONE]
    for i in range(4):
        life += [
            make_step(10 + i, Segment(0, 8 + i, 1, True, (2,) if i == 0 else ()), decodes=1),
            DONE,
        ]
    right = msgspec.structs.replace(
        init_slot(1, tokens=8), tokens=(*range(8), *answer, 5), pages=(0, 1, 2), prompt_tokens=13
    )
    play([*life, right])
    wrong = msgspec.structs.replace(right, tokens=(*range(8), *answer[:3], 7, 5))
    with pytest.raises(ContractViolation, match="shares page 2, which does not hold that prefix"):
        play([*life, wrong])


def replaced(step: Step, **fields) -> Step:
    return msgspec.structs.replace(step, **fields)


WRONG: dict[str, tuple[str, Callable[[], Script]]] = {
    "open twice": ("slot 0 is opened but is open already", lambda: [init_slot(0), init_slot(0)]),
    "close unopened": ("slot 3 is closed but is not open", lambda: [FreeSlot(3)]),
    "all cached": (
        "slot 1: all 8 tokens are cached",
        lambda: [init_slot(0), PREFILL, DONE, init_slot(1, pages=(0, 1))],
    ),
    "share before computed": (
        "slot 1 shares page 0, which does not hold",
        lambda: [init_slot(0), PREFILL, init_slot(1, tokens=9, pages=(0, 1))],
    ),
    "share another prefix": (
        "slot 1 shares page 0, which does not hold",
        lambda: [init_slot(0), PREFILL, DONE, init_slot(1, tokens=9, first=1, pages=(0, 1))],
    ),
    "unopened slot": ("slot 0 is named by step 1 but is not open", lambda: [PREFILL]),
    "gap": (
        "starts at 4, but 0 tokens were scheduled",
        lambda: [init_slot(0), make_step(1, Segment(0, 4, 4, True, (0, 1)))],
    ),
    "repeat": (
        "starts at 0, but 8 tokens were scheduled",
        lambda: [init_slot(0), PREFILL, DONE, replaced(PREFILL, id=2, pass_id=2)],
    ),
    "beyond the known": (
        "ends at 9, but there are 8",
        lambda: [init_slot(0), make_step(1, Segment(0, 0, 9, True, (0, 1, 2)))],
    ),
    "sample inside the prompt": (
        "samples after 4 of 8",
        lambda: [init_slot(0), make_step(1, Segment(0, 0, 4, True, (0,)))],
    ),
    "short block table": (
        "its block table holds 4 tokens",
        lambda: [init_slot(0), make_step(1, Segment(0, 0, 8, True, (0,)))],
    ),
    "no such page": (
        "is given page 8; there are 8",
        lambda: [init_slot(0), make_step(1, Segment(0, 0, 8, True, (0, 8)))],
    ),
    "page of another": (
        "page 1 is given to slot 1 but slot 0 writes it",
        lambda: [init_slot(0), PREFILL, init_slot(1), make_step(2, Segment(1, 0, 8, True, (1, 3)))],
    ),
    "shared page given away": (
        "page 0 is given to slot 2 but other slots share it",
        lambda: [
            init_slot(0),
            PREFILL,
            DONE,
            init_slot(1, tokens=9, pages=(0, 1)),
            FreeSlot(0),
            init_slot(2),
            make_step(2, Segment(2, 0, 8, True, (0, 3))),
        ],
    ),
    "share what is being overwritten": (
        "slot 2 shares page 0, which does not hold",
        lambda: [
            init_slot(0),
            PREFILL,
            DONE,
            FreeSlot(0),
            init_slot(1, first=50),
            make_step(2, Segment(1, 0, 8, True, (0, 1))),
            init_slot(2, tokens=9, pages=(0,)),
        ],
    ),
    "close in flight": (
        "slot 0 is closed while passes",
        lambda: [init_slot(0), PREFILL, FreeSlot(0)],
    ),
    "close between layer groups": (
        "slot 0 is closed while passes",
        lambda: [
            init_slot(0),
            make_step(1, Segment(0, 0, 8, True, (0, 1)), layers=(0, 2)),
            DONE,
            FreeSlot(0),
        ],
    ),
    "layer skipped": (
        "pass 1 stands at layer 2",
        lambda: [
            init_slot(0),
            make_step(1, Segment(0, 0, 8, True, (0, 1)), layers=(0, 2)),
            make_step(2, Segment(0, 0, 8, True, (0, 1)), batch=1, layers=(3, 4)),
        ],
    ),
    "pass begun in its middle": (
        "starts pass 1 at layer 2",
        lambda: [init_slot(0), make_step(1, Segment(0, 0, 8, True, (0, 1)), layers=(2, 4))],
    ),
    "layers beyond the last": (
        r"layers \[0, 5\)",
        lambda: [init_slot(0), make_step(1, Segment(0, 0, 8, True, (0, 1)), layers=(0, 5))],
    ),
    "segments changed": (
        "changes the segments of pass 1",
        lambda: [
            init_slot(0),
            init_slot(1),
            make_step(1, Segment(0, 0, 8, True, (0, 1)), layers=(0, 2)),
            make_step(2, Segment(1, 0, 8, True, (2, 3)), batch=1, layers=(2, 4)),
        ],
    ),
    "pass changes lanes": (
        "pass 1 belongs to lane 0",
        lambda: [
            init_slot(0),
            make_step(1, Segment(0, 0, 8, True, (0, 1)), layers=(0, 2)),
            make_step(2, Segment(0, 0, 8, True, (0, 1)), batch=1, lane=1, layers=(2, 4)),
        ],
    ),
    "the next step on another lane": (
        "pass 1 of lane 0 has not computed what comes before",
        lambda: [
            init_slot(0),
            PREFILL,
            make_step(2, Segment(0, 8, 1, True, (2,)), lane=1, decodes=1),
        ],
    ),
    "the next step before the last layer": (
        "pass 1 of lane 0 has not computed what comes before",
        lambda: [
            init_slot(0),
            make_step(1, Segment(0, 0, 8, True, (0, 1)), layers=(0, 2)),
            make_step(2, Segment(0, 8, 1, True, (2,)), decodes=1),
        ],
    ),
    "too many units": ("asks 5 of 4 units", lambda: [init_slot(0), replaced(PREFILL, units=5)]),
    "overlap": (
        "on 3 units overlaps other lanes, which hold 2",
        lambda: [
            init_slot(0),
            PREFILL,
            init_slot(1),
            make_step(2, Segment(1, 0, 8, True, (2, 3)), lane=1, units=3),
        ],
    ),
    "too deep": (
        "makes 3 in flight on lane 0, which holds 2",
        lambda: [init_slot(0), PREFILL, DECODE, make_step(3, Segment(0, 9, 1, True), decodes=1)],
    ),
    "work of other tokens": (
        "work says other tokens",
        lambda: [
            init_slot(0),
            replaced(PREFILL, work=msgspec.structs.replace(PREFILL.work, prefill_tokens=7)),
        ],
    ),
    "no segments": ("step 1 has no segments", lambda: [make_step(1)]),
    "drop unknown": ("pass 9 is dropped but is not under way", lambda: [DiscardPass(9)]),
    "drop in flight": (
        "pass 1 is dropped with 1 steps in flight",
        lambda: [
            init_slot(0),
            make_step(1, Segment(0, 0, 8, True, (0, 1)), layers=(0, 2)),
            DiscardPass(1),
        ],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_is_stopped(name: str):
    message, script = WRONG[name]
    commands = script()
    play(commands[:-1])
    with pytest.raises(ContractViolation, match=message):
        play(commands)


def test_lanes_may_overlap_where_the_device_says_so():
    play(
        [
            init_slot(0),
            PREFILL,
            init_slot(1),
            make_step(2, Segment(1, 0, 8, True, (2, 3)), lane=1, units=3),
        ],
        overlap=True,
    )


def test_a_dropped_pass_undoes_what_it_scheduled():
    play(
        [
            init_slot(0),
            make_step(1, Segment(0, 0, 8, True, (0, 1)), layers=(0, 2)),
            DONE,
            DiscardPass(1),
            make_step(2, Segment(0, 0, 8, True)),
            DONE,
            FreeSlot(0),
        ]
    ).check_idle()


def test_at_rest_names_what_is_left():
    with pytest.raises(ContractViolation, match=r"slots are open: \[0\]"):
        play([init_slot(0), PREFILL, DONE]).check_idle()
