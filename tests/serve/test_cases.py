"""The table of cases names each of them once, and tests that exist."""

from __future__ import annotations

import re

from serve_process import ROOT


def test_the_table_of_cases_is_whole():
    rows = re.findall(
        r"^\| (\d+) \| (.+?) \| (.+) \|$",
        (ROOT / "docs" / "serving-cases.md").read_text(),
        re.MULTILINE,
    )
    assert [int(number) for number, _, _ in rows] == list(range(1, 61))
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    known = set(re.findall(r"^def (test_\w+)", written, re.MULTILINE))
    for number, _, here in rows:
        named = set(re.findall(r"`(test_\w+)`", here))
        assert named <= known, f"case {number}: {named - known}"
        assert named or here.startswith(("open", "does not apply")), f"case {number} says nothing"
