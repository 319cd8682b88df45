"""From a schema, pattern, list or grammar to the one form that executors read (Sampling.grammar).

Promises: what llguidance can't enforce is an error, not ignored; JSON has at most MAX_BLANKS
whitespace characters between two items, so no answer is endless whitespace; an empty schema means
an object. Must not: compile; a grammar from here may still prove invalid or too costly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from counterpoint.device.grammar import Vocabulary
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.spec.source import ModelSource

StructureKind = Literal["json", "regex", "choice", "lark"]
ANSWER_RULE = "@answer"  # in an outer grammar
MAX_BLANKS = 32
MAX_CHARACTERS = 2**17  # of a client's structure
MAX_GROWTH = 4  # of its grammar's length
JSON_OBJECT: dict[str, Any] = {"type": "object"}
UNCONSTRAINED = ({}, True)  # by these schemas


def make_vocabulary(tokenizer: ModelTokenizer) -> Vocabulary:
    """The model's tokens, for compiling grammars."""
    size = 1 + max(tokenizer.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    return Vocabulary(
        tokens=[tokenizer.token_bytes(token) for token in range(size)],
        special=[token for token in range(size) if tokenizer.is_special(token)],
        encode=lambda text: tokenizer.encode([text], add_special_tokens=False)[0],
    )


class CheckerSetup(msgspec.Struct, frozen=True):
    """The first line to checker_process.py."""

    source: ModelSource
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class CheckRequest(msgspec.Struct, frozen=True):
    """`text`: a schema as JSON, a pattern, a list of texts as JSON, or a grammar. `outer_grammar`:
    see embed_answer."""

    kind: StructureKind
    text: str
    strict: bool
    outer_grammar: str = ""


class CheckResult(msgspec.Struct, frozen=True):
    """A grammar, or the reason why there is none."""

    grammar: str = ""
    error: str = ""


class StructureError(ValueError):
    """The structure can't be enforced; the message says why."""


def from_json_schema(schema: Any, strict: bool = True) -> str:
    """JSON that satisfies `schema`. Without `strict`, unenforceable keywords are ignored and oneOf
    is read as anyOf. Raises StructureError."""
    if not isinstance(schema, dict | bool):
        raise StructureError("a schema is an object")
    if schema in UNCONSTRAINED:
        schema = JSON_OBJECT
    try:
        grammar = LLMatcher.grammar_from_json_schema(
            msgspec.json.encode(schema).decode(),
            overrides=json_options(strict),
        )
        return check_size(grammar)
    except ValueError as error:
        raise StructureError(str(error)) from None


def json_options(strict: bool) -> Any:
    """llguidance's options for reading schemas and writing JSON."""
    return {
        "whitespace_flexible": True,
        "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_BLANKS}}}",
        "item_separator": ",",
        "key_separator": ":",
        "lenient": not strict,
        "coerce_one_of": not strict,
    }


def from_regex(pattern: str) -> str:
    """A full match of `pattern` (syntax of Rust's regex crate). Raises StructureError."""
    return check_size(LLMatcher.grammar_from_regex(pattern))


def from_choice(choices: Sequence[str]) -> str:
    """One of these texts. Raises StructureError."""
    if not choices or not all(choices):
        raise StructureError("give at least one text, none of them empty")
    return from_lark(
        "start: " + " | ".join(msgspec.json.encode(choice).decode() for choice in choices)
    )


def from_lark(grammar: str) -> str:
    """A text of this grammar: llguidance's Lark (start rule `start`) or llama.cpp's GBNF (`root`).
    Raises StructureError."""
    try:
        return check_size(LLMatcher.grammar_from_lark(any_to_lark(grammar)))
    except StructureError:
        raise
    except Exception as error:  # the converter raises plain Exception, and IndexError
        raise StructureError(str(error) or "it is neither Lark nor GBNF") from None


def embed_answer(outer_grammar: str, grammar: str) -> str:
    """`outer_grammar` (Lark) with `grammar` in place of ANSWER_RULE."""
    answer = (
        msgspec.json.decode(grammar)["grammars"][0]
        if grammar.startswith("{")
        else {"lark_grammar": grammar}
    )
    outer = {"name": "whole", "lark_grammar": outer_grammar}
    grammars = [outer, answer | {"name": ANSWER_RULE[1:]}]
    return msgspec.json.encode({"grammars": grammars}).decode()


def check_size(grammar: str) -> str:
    if len(grammar) > MAX_GROWTH * MAX_CHARACTERS:
        limit = MAX_GROWTH * MAX_CHARACTERS
        raise StructureError(
            f"its grammar has {len(grammar)} characters: at most {limit} are taken"
        )
    return grammar
