"""What is found out about chat templates that treat calls in their own ways, as those of known models do."""

from __future__ import annotations

import pytest

from counterpoint.serve.openai import ChatRequest, Message
from counterpoint.serve.speech.dialects import dialect_of
from counterpoint.serve.speech.manners import Manners, manners_of
from counterpoint.serve.speech.tools import conversation, offer_of
from counterpoint.serve.text import Text
from counterpoint.serve.tokenizer import byte_text

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
TURN = "{% for m in messages %}{{ m.role }}:"
AS_JSON = "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
ADDED = "{% for c in m.tool_calls %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %};{% endfor %}"
NEEDS_CONTENT = "{% if '</think>' in m.content %}{% endif %}{{ ' ' + m.content }}"
NEEDS_NULL = "{% if m.role != 'assistant' or m.content is not none %}{{ ' ' + m.content }}{% endif %}"
ONE_CALL = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one!') }}{% endif %}{{ m.content }}"
NINE = (
    "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}{{ c.id }}{% endfor %}"
    "{{ m.content }}"
)
NINE_TOO = "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
FAMILIES = {
    "{{ m.content }}" + AS_JSON: Manners(True),
    NEEDS_CONTENT + AS_JSON: Manners(True, no_content="empty"),
    NEEDS_NULL + ADDED: Manners(True, text_arguments=True, no_content="null"),
    ONE_CALL + AS_JSON: Manners(True, single=True),
    NINE + NINE_TOO + AS_JSON: Manners(True, short_ids=True),
    "{{ m.content }};{% endfor %}": Manners(),
    "{{ m.no.such.thing }}{% endfor %}": Manners(),
}
CALL = {"id": "call_of_another_server", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
HISTORY = [
    Message(role="user", content="How warm?"),
    Message.model_validate({"role": "assistant", "content": None, "tool_calls": [CALL]}),
    Message(role="tool", tool_call_id="call_of_another_server", content="21 degrees"),
    Message(role="assistant", content="It is 21."),
]


@pytest.mark.parametrize("body", FAMILIES)
def test_what_a_template_wants(body: str):
    text = Text(byte_text().tokenizer, TOOLS + TURN + body)
    assert manners_of(text) == FAMILIES[body]


@pytest.mark.parametrize("body", [body for body in FAMILIES if "no.such" not in body])
def test_what_it_wants_is_what_it_gets(body: str):
    text = Text(byte_text().tokenizer, TOOLS + TURN + body)
    tools = [{"type": "function", "function": {"name": "weather", "description": "Tells the weather."}}]
    turns, options = conversation(HISTORY, tools, dialect_of(text))
    prompt = text.render(turns, **options)
    told = ("Tells the weather.", "How warm?", '"city"', "Paris", "21 degrees", "It is 21.")
    places = [prompt.index(word) for word in told]
    assert places == sorted(places) and "None" not in prompt
    assert '"{' not in prompt and "\\" not in prompt.partition("How warm?")[2], "nothing is quoted twice"


def test_a_template_of_single_calls_has_answers_with_one():
    dialect = dialect_of(Text(byte_text().tokenizer, TOOLS + TURN + ONE_CALL + AS_JSON))
    tool = {"type": "function", "function": {"name": "weather"}}
    offer = offer_of(ChatRequest(messages=HISTORY[:1], tools=[tool]), [tool], dialect)  # type: ignore[list-item]
    assert offer is not None and not offer.parallel
