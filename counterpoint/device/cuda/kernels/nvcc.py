"""Builds and loads this folder's CUDA sources.

Owns: the cache of shared objects.
Promises: `nvcc` compiles a source once per content, architecture and flags, in seconds (no torch
headers). Later processes reuse the result. Importing does nothing.
Must not: launch kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
CACHE = Path.home() / ".cache" / "counterpoint" / "kernels"


class KernelError(RuntimeError):
    """A kernel could not be built, loaded or launched. The message says why and how to fix it."""


def architecture(device: int) -> str:
    """The compiler's name of the GPU's instruction set, e.g. "90a" ("a": chip-specific features,
    from Hopper on)."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}{minor}{'a' if major >= 9 else ''}"


def load_library(
    name: str,
    arch: str,
    *,
    headers: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    cache: Path | None = None,
) -> ctypes.CDLL:
    """The shared object of `name`.cu for `arch`, compiled unless cached.

    `headers`: generated files (name: text) that the source includes. Raises KernelError with the
    compiler's output, or with how to get a compiler.
    """
    source = SOURCES / f"{name}.cu"
    headers = dict(headers or {})
    recipe = [
        "-O3",
        "-std=c++17",
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        "-shared",
        "-Xcompiler",
        "-fPIC",
        *flags,
    ]
    key = hashlib.sha256(
        repr([source.read_text(), sorted(headers.items()), recipe]).encode()
    ).hexdigest()[:16]
    built = (cache or CACHE) / f"{name}-{arch}-{key}.so"
    if not built.exists():
        _compile(source, headers, recipe, built)
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:  # built on another system
        log.warning("%s does not load (%s): building it again", built, error)
        _compile(source, headers, recipe, built)
        return ctypes.CDLL(str(built))


def check_launch(code: int, what: str) -> None:
    """Raise KernelError unless `code`, a cudaError_t, is success."""
    if code:
        raise KernelError(f"{what}: {torch.cuda.CudaError(code)}")


def struct_fields(kind: str, names: str) -> list[tuple[str, Any]]:
    """Consecutive fields of a ctypes.Structure, all of C type `kind`, e.g. int64."""
    return [(name, getattr(ctypes, f"c_{kind}")) for name in names.split()]


def _compile(source: Path, headers: Mapping[str, str], recipe: Sequence[str], built: Path) -> None:
    compiler = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if compiler is None:
        raise KernelError(
            f"{source.name} must be compiled and there is no nvcc on PATH or in "
            f"/usr/local/cuda/bin: install the CUDA toolkit (12.4 or newer), or copy "
            f"{built.name} from a machine that has one to {built.parent}"
        )
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            for name, text in headers.items():
                (Path(folder) / name).write_text(text)
            target = Path(folder) / built.name
            command = [compiler, *recipe, "-I", folder, "-o", str(target), str(source)]
            log.info("building %s", built.name)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise KernelError(
                    f"{' '.join(command)} failed:\n{done.stderr.strip() or done.stdout.strip()}"
                )
            os.replace(target, built)
    except OSError as error:
        raise KernelError(
            f"{built.name} can't be built in {built.parent}: {error.strerror}"
        ) from None
