"""The house's size: names that mean one thing, and files, functions and lines that can be read."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "counterpoint"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path for room in ("counterpoint", "benchmarks", "tests") for path in (ROOT / room).rglob("*.py")
)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_COLUMNS = 100
MAX_PARAMETERS = 5

# Class names that two modules may define, each with its reason. None at present.
SHARED_CLASS_NAMES: set[str] = set()
# Kernels, and operators that pass a kernel's tensors on.
MANY_PARAMETERS = {
    f"counterpoint/{path}:{name}"
    for path, names in {
        "device/cuda/batch_invariant.py": "attention_kernel product_kernel tiled_attention",
        "device/cuda/kernels/attention.py": "__call__ prepare_layers",
        "device/cuda/kernels/layer.py": "rope_and_append",
        "device/cuda/triton_kernels.py": (
            "add_rms_norm_kernel decode_attention decode_merge_kernel decode_part_kernel "
            "gather_kernel rms_norm_kernel rope_and_append rope_and_append_kernel turn_heads"
        ),
        "model/native.py": "rope_and_append",
        "model/ops.py": "rope_and_append",
        "model/ops_cpu.py": "append_finite",
    }.items()
    for name in names.split()
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> list[Function]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def code_of(line: str) -> str:
    """Without a checker's directive, which must stand on its line."""
    return line.partition("  # type: ignore")[0]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parameters(function: Function) -> list[str]:
    """Without the object or class itself."""
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def test_a_class_name_has_one_meaning():
    places: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name_of(path))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert set(shared) == SHARED_CLASS_NAMES, f"defined in two modules: {shared}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_file_can_be_read_in_one_sitting(path: Path):
    lines = path.read_text().count("\n")
    assert lines <= MAX_FILE_LINES, f"{name_of(path)} has {lines} lines: split it at a seam"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_line_fits_the_page(path: Path):
    lines = enumerate(path.read_text().split("\n"), 1)
    wide = [number for number, line in lines if len(code_of(line)) > MAX_COLUMNS]
    assert not wide, f"{name_of(path)}: lines {wide} are over {MAX_COLUMNS} columns"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_function_can_be_seen_whole(path: Path):
    for function in functions(path):
        lines = (function.end_lineno or 0) - function.lineno + 1
        where = f"{name_of(path)}:{function.lineno} {function.name}"
        assert lines <= MAX_FUNCTION_LINES, f"{where} has {lines} lines: name its parts"


def test_parameters_are_few():
    many = {
        f"{name_of(path)}:{function.name}"
        for path in MODULES
        for function in functions(path)
        if len(parameters(function)) > MAX_PARAMETERS
    }
    new, gone = many - MANY_PARAMETERS, MANY_PARAMETERS - many
    assert not new, f"more than {MAX_PARAMETERS} parameters, group what belongs together: {new}"
    assert not gone, f"no longer needed in MANY_PARAMETERS: {gone}"
