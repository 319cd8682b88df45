"""Two tools, calls of them, and a chat template that shows tools, calls and reasoning."""

from __future__ import annotations

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": PARAMETERS,
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = f'{ONE}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'
CALLS = [("weather", '{"city": "Paris"}'), ("time", "{}")]
# As in models of the Hermes and Qwen families. Shows a call's arguments as it gets them.
TEMPLATE = """{% if tools %}<|im_start|>system
{{ tools | tojson }} as <tool_call> JSON</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}{% for call in m.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}<think>
{% if not enable_thinking %}
</think>

{% endif %}{% endif %}{% endif %}"""
