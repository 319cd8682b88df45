"""A process that checks grammars: `python -m counterpoint.serve.structured_output.checker_process`.

GrammarChecker starts it. It reads one line of JSON per check and writes one. A grammar that takes
too much time or memory, or nests too deeply, ends this process only. It ends when stdin closes.

A grammar that compiles here on a small stack compiles in the engine on a large one. A few tokens of
an answer are tried too, because most costly grammars fail there.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from counterpoint.device.grammar import compile_grammar, make_tokenizer
from counterpoint.serve.structured_output.grammar import (
    CheckerSetup,
    CheckRequest,
    CheckResult,
    StructureError,
    embed_answer,
    from_choice,
    from_json_schema,
    from_lark,
    from_regex,
    make_vocabulary,
)
from counterpoint.serve.text.tokenizer_loader import load_tokenizer

CPU_S, WALL_S = 2.0, 20.0
MEMORY_BYTES = 1 << 30  # beyond the vocabulary's
STACK_BYTES = 1 << 20
MAX_MESSAGE_CHARACTERS = 500
NICENESS = 10
SCHEMA_ERROR_PREFIX = "failed to compile JSON schema: "
GRAMMAR_EXCERPT = re.compile(r"\n +\d+ \| ")
WALK_TOKENS, WALK_STRIDE = 32, 7919  # the stride is a prime


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles them
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    requests, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps what libraries print out of the results
    setup = msgspec.json.decode(requests.readline(), type=CheckerSetup)
    tokenizer = make_tokenizer(
        make_vocabulary(load_tokenizer(setup.source)), setup.vocab_size, setup.eos_token_ids
    )
    limit_memory()
    threading.stack_size(STACK_BYTES)
    for line in requests:
        with limit_time():
            result = check_on_small_stack(msgspec.json.decode(line, type=CheckRequest), tokenizer)
        results.write(msgspec.json.encode(result) + b"\n")
        results.flush()


def limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        most = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


@contextlib.contextmanager
def limit_time() -> Iterator[None]:
    """Either timer's signal ends the process."""
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def check_on_small_stack(request: CheckRequest, tokenizer: LLTokenizer) -> CheckResult:
    results: list[CheckResult] = []
    thread = threading.Thread(target=lambda: results.append(check_grammar(request, tokenizer)))
    thread.start()
    thread.join()
    return results[0]


def check_grammar(request: CheckRequest, tokenizer: LLTokenizer) -> CheckResult:
    try:
        grammar = build_grammar(request)
        if request.outer_grammar:
            grammar = embed_answer(request.outer_grammar, grammar)
        matcher = compile_grammar(grammar, tokenizer)
        walk_tokens(matcher, tokenizer)
        if matcher.is_error():
            return CheckResult(error=describe_error(matcher.get_error()))
        return CheckResult(grammar)
    except StructureError as error:
        return CheckResult(error=describe_error(str(error)))
    except Exception as error:  # mostly too deep nesting
        return CheckResult(error=describe_error(f"{type(error).__name__}: {error}"))


def walk_tokens(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Feeds the matcher the first tokens of an answer, each chosen among those allowed."""
    ends = set(tokenizer.eos_tokens)
    for step in range(WALK_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            return
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [id for id in np.flatnonzero(bits).tolist() if id not in ends]
        if not allowed or not matcher.consume_token(allowed[WALK_STRIDE * step % len(allowed)]):
            return


def build_grammar(request: CheckRequest) -> str:
    """Raises StructureError."""
    text = request.text
    match request.kind:
        case "json":
            return from_json_schema(decode_schema(text), request.strict)
        case "regex":
            return from_regex(text)
        case "choice":
            return from_choice(msgspec.json.decode(text, type=list[str]))
        case "lark":
            return from_lark(text)


def decode_schema(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise StructureError(f"the schema is not JSON: {error}") from None


def describe_error(error: str) -> str:
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    _, schema, reason = error.partition(SCHEMA_ERROR_PREFIX)
    if schema:  # without the grammar that was built from it, which the client did not send
        error = GRAMMAR_EXCERPT.split(reason)[0]
    if "'coerce_one_of'" in error:
        return (
            "oneOf is enforced only where its schemas clearly exclude each other: "
            "use anyOf, or strict false"
        )
    message = error.removesuffix("<non-verbose/>").strip()
    return message[:MAX_MESSAGE_CHARACTERS] or "it cannot be enforced"


if __name__ == "__main__":
    main()
