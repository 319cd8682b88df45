"""Finds the structure that a request asks for, and checks its grammar in another process.

Promises: an invalid or too costly structure is a 400 that names the field. Client input is compiled
only in checker_process.py, which starts with the first structure and is restarted when it dies; the
event loop never waits for it. Must not: write grammars (grammar.py does).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from counterpoint.serve.api.errors import ApiError, Overloaded
from counterpoint.serve.api.openai import GenerationRequest, SampledRequest
from counterpoint.serve.structured_output.grammar import (
    JSON_OBJECT,
    MAX_CHARACTERS,
    CheckerSetup,
    CheckRequest,
    CheckResult,
    StructureKind,
)
from counterpoint.spec.source import ModelSource

STRUCTURE_FIELDS: dict[str, StructureKind] = {
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
    "json_schema": "json",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
}
# By member of structured_outputs.
STRUCTURED_OUTPUTS_KINDS: dict[str, StructureKind] = {
    "json_": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
}
MAX_WAITING = 64  # checks
MAX_CACHED = 64  # results
TOO_COSTLY = "compiling it takes too much time or memory, or it nests too deeply"
log = logging.getLogger(__name__)
encode = msgspec.json.encode


class WantedStructure(msgspec.Struct, frozen=True):
    """The structure of an answer, as the field `param` has it. `value`: for "json" a schema or its
    JSON text, for "choice" the texts. `outer_grammar`: see grammar.embed_answer."""

    kind: StructureKind
    value: Any
    param: str
    strict: bool = True
    outer_grammar: str = ""


def find_structure(request: SampledRequest) -> WantedStructure | None:
    """Raises ApiError if more than one is given."""
    # model_dump would copy, and a schema may be large.
    found = [
        WantedStructure(STRUCTURE_FIELDS[name], value, name)
        for name, value in request
        if name in STRUCTURE_FIELDS and (value or value == {})
    ]
    for name, value in request.structured_outputs or ():
        if name == "json_object" and value:
            found.append(WantedStructure("json", JSON_OBJECT, "structured_outputs"))
        elif name in STRUCTURED_OUTPUTS_KINDS and value is not None:
            found.append(
                WantedStructure(STRUCTURED_OUTPUTS_KINDS[name], value, "structured_outputs")
            )
    if isinstance(request, GenerationRequest) and request.response_format is not None:
        form = request.response_format
        if form.json_schema is not None and form.type == "json_schema":
            schema, strict = form.json_schema.schema_, form.json_schema.strict is not False
            found.append(WantedStructure("json", schema, "response_format", strict))
        elif form.type == "json_object":
            schema = JSON_OBJECT if form.schema_ is None else form.schema_
            found.append(WantedStructure("json", schema, "response_format"))
    if len(found) > 1:
        names = " and ".join(dict.fromkeys(wanted.param for wanted in found))
        raise ApiError(
            400,
            f"{names} give {len(found)} structures for the answer: give one",
            param=found[1].param,
        )
    return found[0] if found else None


def encode_check(wanted: WantedStructure) -> bytes:
    """Raises ValueError, OverflowError or RecursionError."""
    text = wanted.value if isinstance(wanted.value, str) else encode(wanted.value).decode()
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters: at most {MAX_CHARACTERS} are taken")
    return encode(CheckRequest(wanted.kind, text, wanted.strict, wanted.outer_grammar))


def invalid_structure(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param}: {reason}", param=param, code="invalid_structure")


class GrammarChecker:
    """For the model of `source`, whose engine has token ids below `vocab`. Call `check` from one
    event loop at a time."""

    def __init__(self, source: ModelSource, vocab: int, eos_token_ids: tuple[int, ...]) -> None:
        self._setup = CheckerSetup(source, vocab, eos_token_ids)
        self._child: subprocess.Popen[bytes] | None = None
        self._pool = ThreadPoolExecutor(1, "structure")  # one check at a time
        self._num_waiting = 0
        self._closing = False
        self._cache: OrderedDict[bytes, CheckResult] = OrderedDict()

    async def check(self, structure: WantedStructure) -> str:
        """The grammar. Raises ApiError; Overloaded if too many checks wait."""
        param = structure.param
        if not self._setup.eos_token_ids:
            message = "this model has no end-of-sequence token to end a structure with"
            raise ApiError(400, f"{param}: {message}", param=param)
        try:
            request = await asyncio.to_thread(encode_check, structure)
        except Exception as error:  # too long, numbers beyond 64 bits, nesting
            raise invalid_structure(param, str(error)) from None
        result = await self._cached_result(request)
        if result.error:
            raise invalid_structure(param, result.error)
        return result.grammar

    async def _cached_result(self, request: bytes) -> CheckResult:
        """A cached result does not wait for running checks."""
        key = hashlib.sha256(request).digest()
        result = self._cache.pop(key, None)
        if result is None:
            if self._num_waiting >= MAX_WAITING:
                raise Overloaded(
                    f"{self._num_waiting} structures wait already to be checked: try again later"
                )
            self._num_waiting += 1
            try:
                result = await asyncio.get_running_loop().run_in_executor(
                    self._pool, self._run_check, request
                )
            finally:
                self._num_waiting -= 1
        self._cache[key] = result
        while len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return result

    def close(self) -> None:
        self._closing = True
        if self._child is not None:
            self._child.kill()
        self._pool.shutdown(cancel_futures=True)
        self._end_child()

    # ------------------------------------------------------------ in the thread

    def _run_check(self, request: bytes) -> CheckResult:
        """Tries again once if the process was killed from outside."""
        result = self._ask_child(request) or self._ask_child(request)
        return result or CheckResult(error=TOO_COSTLY)

    def _ask_child(self, request: bytes) -> CheckResult | None:
        """None if another program killed the process (SIGKILL), which no grammar causes."""
        child = self._running_child()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(request + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except OSError:
            line = b""
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=CheckResult)
        status = child.wait()
        log.warning(
            "the process that checks grammars ended with status %d: a new one starts", status
        )
        self._end_child()
        if status == -signal.SIGKILL and not self._closing:
            return None
        return CheckResult(error=TOO_COSTLY)

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end_child()
        command = [sys.executable, "-m", "counterpoint.serve.structured_output.checker_process"]
        child = self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdin is not None
        child.stdin.write(encode(self._setup) + b"\n")
        return child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
