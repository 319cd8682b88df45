"""Capabilities found in chat templates that treat calls as those of known models do."""

from __future__ import annotations

import pytest

from counterpoint.serve.api.openai import ChatMessage, ChatRequest
from counterpoint.serve.output_parsing.chat_formats import find_chat_format
from counterpoint.serve.output_parsing.template_capabilities import (
    TemplateCapabilities,
    detect_capabilities,
)
from counterpoint.serve.output_parsing.tools import find_allowed_tools, make_template_messages
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.serve.text.tokenizer_loader import make_byte_tokenizer

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
TURN = "{% for m in messages %}{{ m.role }}:"
AS_JSON = (
    "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %};{% endfor %}"
)
ADDED = (
    "{% for c in m.tool_calls %}{{ c.function.name + ' ' + c.function.arguments }}"
    "{% endfor %};{% endfor %}"
)
NEEDS_CONTENT = "{% if '</think>' in m.content %}{% endif %}{{ ' ' + m.content }}"
NEEDS_NULL = (
    "{% if m.role != 'assistant' or m.content is not none %}{{ ' ' + m.content }}{% endif %}"
)
ONE_CALL = (
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one!') }}{% endif %}"
    "{{ m.content }}"
)
NINE = (
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine!') }}"
    "{% endif %}{{ c.id }}{% endfor %}{{ m.content }}"
)
NINE_TOO = (
    "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('nine!') }}"
    "{% endif %}"
)
FAMILIES = {
    "{{ m.content }}" + AS_JSON: TemplateCapabilities(True),
    NEEDS_CONTENT + AS_JSON: TemplateCapabilities(True, empty_content="empty"),
    NEEDS_NULL + ADDED: TemplateCapabilities(True, string_arguments=True, empty_content="null"),
    ONE_CALL + AS_JSON: TemplateCapabilities(True, single_call=True),
    NINE + NINE_TOO + AS_JSON: TemplateCapabilities(True, short_ids=True),
    "{{ m.content }};{% endfor %}": TemplateCapabilities(),
    "{{ m.no.such.thing }}{% endfor %}": TemplateCapabilities(),
}
CALL = {
    "id": "call_of_another_server",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
HISTORY = [
    ChatMessage(role="user", content="How warm?"),
    ChatMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [CALL]}),
    ChatMessage(role="tool", tool_call_id="call_of_another_server", content="21 degrees"),
    ChatMessage(role="assistant", content="It is 21."),
]


@pytest.mark.parametrize("body", FAMILIES)
def test_capabilities_of_each_family(body: str):
    text = ModelTokenizer(make_byte_tokenizer().tokenizer, TOOLS + TURN + body)
    assert detect_capabilities(text) == FAMILIES[body]


@pytest.mark.parametrize("body", [body for body in FAMILIES if "no.such" not in body])
def test_templates_get_calls_as_they_want_them(body: str):
    text = ModelTokenizer(make_byte_tokenizer().tokenizer, TOOLS + TURN + body)
    tools = [
        {"type": "function", "function": {"name": "weather", "description": "Tells the weather."}}
    ]
    turns, options = make_template_messages(HISTORY, tools, find_chat_format(text))
    prompt = text.apply_chat_template(turns, **options)
    told = ("Tells the weather.", "How warm?", '"city"', "Paris", "21 degrees", "It is 21.")
    places = [prompt.index(word) for word in told]
    assert places == sorted(places) and "None" not in prompt
    assert '"{' not in prompt and "\\" not in prompt.partition("How warm?")[2], (
        "nothing is quoted twice"
    )


def test_a_template_of_single_calls_has_answers_with_one():
    dialect = find_chat_format(
        ModelTokenizer(make_byte_tokenizer().tokenizer, TOOLS + TURN + ONE_CALL + AS_JSON)
    )
    tool = {"type": "function", "function": {"name": "weather"}}
    offer = find_allowed_tools(ChatRequest(messages=HISTORY[:1], tools=[tool]), [tool], dialect)  # type: ignore[list-item]
    assert offer is not None and not offer.parallel
