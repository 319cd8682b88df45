"""Token and block tables as the tensors of a pass."""

from __future__ import annotations

import torch

from counterpoint.device.slot_tables import SlotTables, make_pass_rows
from counterpoint.model.ops import reference_ops
from counterpoint.types import InitSlot, Sampling, Segment

GREEDY = Sampling(max_tokens=4, temperature=0.0)


def make_tables() -> SlotTables:
    tables = SlotTables(slots=4, max_context_tokens=32, page_tokens=4, vocab=100)
    tables.init_slot(InitSlot(2, (11, 12, 13, 14, 15, 16), 6, (7,), GREEDY))
    tables.init_slot(InitSlot(0, (21, 22, 23), 3, (), GREEDY))
    return tables


def test_a_pass_is_gathered_in_segment_order():
    tables = make_tables()
    segments = [Segment(2, 4, 2, True, (9,)), Segment(0, 0, 3, False, (5,))]
    tables.append_pages(segments)
    rows = make_pass_rows(segments)
    batch = tables.pass_tensors(rows, reference_ops())
    assert batch.tokens_T.tolist() == [15, 16, 21, 22, 23]
    assert batch.positions_T.tolist() == [4, 5, 0, 1, 2]
    assert batch.kv_rows_T.tolist() == [9 * 4, 9 * 4 + 1, 5 * 4, 5 * 4 + 1, 5 * 4 + 2]
    assert batch.sample_rows_B.tolist() == [1]
    assert rows.slot_B.tolist() == [2] and rows.end_B.tolist() == [6]


def test_sampled_tokens_are_the_next_pass_input():
    tables = make_tables()
    segments = [Segment(2, 4, 2, True, (9,)), Segment(0, 0, 3, True, (5,))]
    tables.append_pages(segments)
    tables.put_sampled(make_pass_rows(segments), torch.tensor([42, -1]))
    rows = make_pass_rows([Segment(0, 3, 1, True), Segment(2, 6, 1, True)])
    assert tables.pass_tensors(rows, reference_ops()).tokens_T.tolist() == [0, 42]


def test_init_slot_overwrites_the_row():
    tables = make_tables()
    tables.init_slot(InitSlot(2, (31, 32), 2, (), GREEDY))
    segments = [Segment(2, 0, 2, True, (3,))]
    tables.append_pages(segments)
    batch = tables.pass_tensors(make_pass_rows(segments), reference_ops())
    assert batch.tokens_T.tolist() == [31, 32]
    assert batch.kv_rows_T.tolist() == [12, 13]


def test_the_last_token_of_a_full_context_fits():
    tables = SlotTables(slots=1, max_context_tokens=8, page_tokens=4, vocab=100)
    tables.init_slot(InitSlot(0, tuple(range(8)), 8, (), GREEDY))
    tables.put_sampled(make_pass_rows([Segment(0, 7, 1, True)]), torch.tensor([9]))
    assert tables.tokens[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9]


def test_memory_of_a_large_service_is_small():
    tables = SlotTables(slots=256, max_context_tokens=8192, page_tokens=16, vocab=50_000)
    assert tables.tokens.nbytes + tables.pages.nbytes < 10e6
