"""What a request costs the event loop before the engine gets it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from counterpoint.serve.api.openai import ChatRequest
from counterpoint.serve.api.request_parsing import parse_request
from counterpoint.serve.structured_output.checker import GrammarChecker
from counterpoint.serve.text.preprocess import INLINE_CHARACTERS, Preprocessor
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.serve.text.tokenizer_loader import CHATML, make_byte_tokenizer
from counterpoint.serve.worker.wire import EngineInfo
from counterpoint.spec.source import ModelSource
from counterpoint.types import Role

LONG = "x" * (INLINE_CHARACTERS + 1)
TEMPLATE = (
    CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls }}{{ m.name }}"
    )
    + "{{ today }}"
)
HELLO = EngineInfo(
    pid=1, policy="", lanes="", roles=(Role.BOTH,), vocab=258, max_context_tokens=8192,
    page_tokens=4, kv_tokens=8192, eos_token_ids=(257,),
)  # fmt: skip


class Seen(ModelTokenizer):
    """`threads`: those in which texts were tokenised."""

    def __init__(self) -> None:
        super().__init__(make_byte_tokenizer().tokenizer, TEMPLATE)
        self.threads: list[int] = []

    def encode(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        self.threads.append(threading.get_ident())
        return super().encode(texts, special)


def asked(body: dict[str, Any]) -> tuple[int, int]:
    """(prompt tokens, thread that tokenised)."""

    async def work() -> tuple[int, int]:
        source, text = ModelSource("spec", "", "m"), Seen()
        checker = GrammarChecker(source, HELLO.vocab, HELLO.eos_token_ids)
        try:
            ask = await Preprocessor(text, HELLO, "m", checker).prepare_chat(
                parse_request(ChatRequest, msgspec.json.encode(body))
            )
        finally:
            checker.close()
        return len(ask.engine_requests[0].prompt), text.threads[-1]

    return asyncio.run(work())


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": LONG}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "user", "content": "a", "name": LONG}]},
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": LONG}]},
        {"messages": [{"role": "assistant", "content": "a", "reasoning": LONG}]},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [CALL]}]},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"today": LONG}},
    ],
    ids=["content", "name", "reasoning_content", "reasoning", "calls", "template"],
)
def test_long_requests_are_tokenised_off_the_event_loop(body):
    tokens, thread = asked(body)
    assert tokens > INLINE_CHARACTERS and thread != threading.get_ident()


def test_short_requests_are_tokenised_inline():
    assert asked({"messages": [{"role": "user", "content": "a"}]})[1] == threading.get_ident()
