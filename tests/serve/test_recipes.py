"""The recipes for several machines name commands and flags that there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from counterpoint.cli import app

RECIPES = Path(__file__).parents[2] / "recipes" / "pools"


def commands(tree: Any) -> Iterator[list[str]]:
    """Every list in it that begins with our command."""
    if isinstance(tree, list) and tree[:1] == ["counterpoint"]:
        yield tree[1:]
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from commands(part)


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml"])
def test_recipes_name_what_there_is(name: str):
    found = [words for tree in yaml.safe_load_all((RECIPES / name).read_text()) for words in commands(tree)]
    assert [words[0] for words in found] == ["serve", "worker", "worker"]
    for words in found:
        app.parse_args(words, exit_on_error=False, print_error=False)
