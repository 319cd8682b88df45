"""Which room may import which, and which may use torch, clocks, asyncio, the environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "counterpoint"

# From the top floor down. Rooms on one floor never import each other.
FLOORS = [
    {"__main__", "cli"},
    {"simulator"},
    {"serve", "bench"},
    {"builder"},
    {"disagg", "device"},
    {"core", "cost_model", "model", "kv_transfer"},
    {"types", "interfaces", "stats", "config", "flags", "spec"},
]
# The ground floor has an order of its own: each of these may import those behind it.
CONTRACTS = ["flags", "config", "interfaces", "stats", "spec", "types"]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# What a room may reach for outside the package, beside what anyone may.
TORCH = {"model", "device", "kv_transfer", "builder"}
TORCH_FREE = {
    "device/event_queue.py",
    "device/sim.py",
    "device/contract_checker.py",
    "device/timeline.py",
    "device/cores.py",
}
CLOCKS = {"device", "kv_transfer", "serve", "bench", "disagg", "simulator"}
ASYNC = {"serve", "disagg", "bench", "simulator"}
ENVIRON = {"builder", "worker_setup", "cli"}

MODULES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, int]]:
    """Every module that is imported when this one runs (not for type checking alone)."""
    found = []
    skip: set[ast.AST] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skip.update(child for statement in node.body for child in ast.walk(statement))
        if node in skip:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}:{node.lineno}: relative import")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path):
    here = room(path)
    if here in ("__init__", "__main__"):
        return
    for name, line in imports(path):
        parts = name.split(".")
        if (
            parts[0] != "counterpoint"
            or len(parts) < 2
            or parts[1] == here
            or parts[1].startswith("__")
        ):
            continue
        there = parts[1]
        assert there in FLOOR, (
            f"{path}:{line}: {there} is no room of the house: give it a floor in {__file__}"
        )
        if here in CONTRACTS and there in CONTRACTS:
            assert CONTRACTS.index(there) > CONTRACTS.index(here), (
                f"{path}:{line}: {here} must not import {there}"
            )
            continue
        assert FLOOR[there] > FLOOR[here], f"{path}:{line}: {here} must not import {there}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_keep_to_their_tools(path: Path):
    here, relative = room(path), str(path.relative_to(PACKAGE))
    for name, line in imports(path):
        top = name.split(".")[0]
        where = f"{path}:{line}"
        if top == "torch":
            assert here in TORCH and relative not in TORCH_FREE, f"{where}: torch"
        if top in ("time", "datetime"):
            assert here in CLOCKS, f"{where}: a clock"
        if top == "asyncio":
            assert here in ASYNC, f"{where}: asyncio"
        if name == "os.environ":
            assert here in ENVIRON, f"{where}: the environment"
    if here not in ENVIRON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                raise AssertionError(f"{path}:{node.lineno}: the environment")


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import counterpoint.core.engine, counterpoint.core.loop, counterpoint.core.policy",
        "import counterpoint.device.sim, counterpoint.simulator.simulate",
        "import counterpoint.bench.trace, counterpoint.bench.report",
        "import counterpoint.spec.source",
        "import counterpoint.cli",
    ],
)
def test_no_torch_is_loaded(statement: str):
    assert not imported_by(statement) & {"torch", "transformers"}


def test_every_module_says_what_it_is():
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no head"
