"""The papers' settings: what can be done by hand, and that a setting runs to its table."""

from __future__ import annotations

import dataclasses

import pytest

from counterpoint import papers
from counterpoint.perf.roofline import Product


def test_waves_by_hand():
    """192 tiles on 108 SMs: two waves, of which 24 places stay empty."""
    work, room = papers.one_tile(Product(6144, 4096), 1024, 108)
    assert 1 - work / room == pytest.approx(24 / 216)


def test_waves_fall_with_length_and_start_where_the_paper_does():
    rows = {row["tokens"]: row for row in papers.wave_rows()}
    idle = [rows[n]["one tile"] for n in (1024, 2048, 4096, 16384)]
    assert idle == sorted(idle, reverse=True)
    assert rows[1024]["one tile"] == pytest.approx(0.23, abs=0.01)
    assert rows[2048]["one tile"] == pytest.approx(0.107, abs=0.005)
    assert all(row["chosen tiles"] <= row["one tile"] + 0.01 for row in rows.values())


def test_a_setting_runs_to_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(papers, "CHUNKS", (512, 1024))
    monkeypatch.setattr(papers, "PRECISION", 0.2)
    load = {"prompt_tokens": 2000, "output_tokens": 8, "prompt_lengths": "constant", "output_lengths": "constant"}
    setting = dataclasses.replace(papers.SETTINGS[1], load=load, slo="ttft=0.4,tpot=100ms")
    told: list[str] = []
    result = papers.run(setting, tmp_path, 10, told.append)
    assert len(told) == len(result["rates"]) == 2 + 4 + 1
    assert all(rate > 0 for rate in result["rates"].values())
    text = papers.show([result], list(papers.wave_rows()))
    assert "| MuxWise | llama-3.1-8b, a100, ShareGPT-like |" in text
    assert "19.4%" in text
