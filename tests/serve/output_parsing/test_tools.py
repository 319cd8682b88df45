"""Grammars of answers that must or may call: which texts they accept, and that these parse as
calls."""

from __future__ import annotations

import pytest
from parser_cases import parse_text, template_with

from counterpoint.device.grammar import compile_grammar, make_tokenizer
from counterpoint.serve.output_parsing.chat_formats import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEP,
    find_chat_format,
)
from counterpoint.serve.output_parsing.streaming_parser import make_parser_config
from counterpoint.serve.output_parsing.tool_call_parser import AllowedTools
from counterpoint.serve.output_parsing.tools import make_answer_grammar
from counterpoint.serve.structured_output.grammar import (
    ANSWER_RULE,
    embed_answer,
    from_choice,
    from_json_schema,
    from_lark,
    make_vocabulary,
)
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.serve.text.tokenizer_loader import make_byte_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
}
CITY |= {"$defs": {"city": {"type": "string"}}}
TOOLS = (
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time", "description": 'a ::= "b"'}},
)
HERMES = "<tool_call> </think>"
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = f'{ONE}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'
ANSWERS = {  # two calls in each form; by the marks in a chat template
    HERMES: TWO,
    "<tool_call> <function=": TWO,
    "[TOOL_CALLS]": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, '
    '{"name": "time", "arguments": {}}]',
    "[TOOL_CALLS] [ARGS] [/THINK]": '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}'
    "[TOOL_CALLS]time[ARGS]{}",
    DEEPSEEK_CALL: f"{DEEPSEEK_BEGIN}{DEEPSEEK_CALL}function{DEEPSEEK_SEP}"
    "weather\n```json\n"
    f'{{"city": "Paris"}}\n```{DEEPSEEK_CALL_END}\n'
    f"{DEEPSEEK_CALL}function{DEEPSEEK_SEP}time\n```json\n"
    f"{{}}\n```{DEEPSEEK_CALL_END}{DEEPSEEK_END}",
    "no marks": TWO,
}


def text_of(template: str) -> ModelTokenizer:
    """A tokenizer whose chat template has these markers."""
    tokenizer = make_byte_tokenizer().tokenizer
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"])
    return ModelTokenizer(tokenizer, template_with(template))


def takes(
    template: str,
    answer: str,
    *,
    prompt: str = "",
    answer_prefix: str = "",
    allowed_tools: AllowedTools | None = AllowedTools(TOOLS),
    wanted: str = "",
) -> bool:
    """Whether the grammar accepts `answer` as complete."""
    text = text_of(template)
    vocabulary = make_vocabulary(text)
    config = make_parser_config(
        find_chat_format(text).with_known_call_format(), allowed_tools, True, answer_prefix
    )
    assert config is not None
    tokenizer = make_tokenizer(vocabulary, len(vocabulary.tokens), (257,))
    lark = make_answer_grammar(config, text, prompt, ANSWER_RULE if wanted else "")
    matcher = compile_grammar(embed_answer(lark, wanted) if wanted else from_lark(lark), tokenizer)
    assert not matcher.get_error(), matcher.get_error()
    tokens = text.encode([answer], add_special_tokens=False)[0]
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("template", ANSWERS)
def test_grammars_accept_calls_in_the_models_format(template: str):
    answer = ANSWERS[template]
    assert takes(template, answer)
    assert (
        not takes(template, "Paris")
        and not takes(template, answer[:-1])
        and not takes(template, answer + "!")
    )
    for wrong in (
        answer.replace("weather", "whether"),
        answer.replace('"Paris"', "7"),
        answer.replace("city", "town"),
    ):
        assert not takes(template, wrong)
    chat_format = find_chat_format(text_of(template)).with_known_call_format()
    assert [
        name for name, _ in parse_text(chat_format, answer, allowed_tools=AllowedTools(TOOLS))[2]
    ] == [
        "weather",
        "time",
    ]


def test_llama_calls_once():
    template, answer = "<|python_tag|>", '{"name": "weather", "parameters": {"city": "Paris"}}'
    assert takes(template, answer) and not takes(template, f"{answer}; {answer}")


def test_one_tool_and_one_call():
    assert not takes(HERMES, TWO, allowed_tools=AllowedTools(TOOLS, parallel=False)) and takes(
        HERMES, ONE, allowed_tools=AllowedTools(TOOLS, parallel=False)
    )
    assert not takes(HERMES, TWO, allowed_tools=AllowedTools(TOOLS[:1])) and takes(
        HERMES, f"{ONE}\n{ONE}", allowed_tools=AllowedTools(TOOLS[:1])
    )


def test_blanks_in_arguments_are_bounded():
    for blanks, taken in ((1, True), (32, True), (33, False)):
        assert takes(HERMES, ONE.replace(': "Paris"', ":" + " " * blanks + '"Paris"')) is taken


def test_a_model_may_think_before_it_calls():
    assert takes(HERMES, f"<think>\nhm, </thin\n</think>\n\n{ONE}")
    assert takes(HERMES, f"hm</think>{ONE}", answer_prefix="<think>") and not takes(
        HERMES, ONE, answer_prefix="<think>"
    )
    assert not takes(HERMES, f"<think>hm</think>{ONE}", prompt="<think>\n\n</think>\n\n"), (
        "the prompt has put an end to it"
    )
    assert not takes("<tool_call>", f"<think>hm</think>{ONE}"), "this one does not think"
    assert takes(
        "[TOOL_CALLS] [ARGS] [/THINK]",
        '[THINK]hm[/THINK]\n[TOOL_CALLS]weather[ARGS]{"city": "Paris"}',
    )


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [
        (from_json_schema(SCHEMA), '{"a": 1}'),
        (from_choice(["yes", "no"]), "yes"),
        (from_lark('start: "a" b\nb: "b"*'), "abb"),
    ],
)
def test_a_structure_follows_the_reasoning(wanted: str, answer: str):
    assert takes(HERMES, answer, allowed_tools=None, wanted=wanted) and not takes(
        HERMES, ONE, allowed_tools=None, wanted=wanted
    )
    assert takes(HERMES, f"<think>hm</think>\n{answer}", allowed_tools=None, wanted=wanted)
    assert takes(
        HERMES, f"hm</think>{answer}", answer_prefix="<think>", allowed_tools=None, wanted=wanted
    )
    assert not takes(HERMES, answer, answer_prefix="<think>", allowed_tools=None, wanted=wanted), (
        "it would be taken for a thought"
    )
    assert takes(HERMES, answer, wanted=wanted) and takes(
        HERMES, f"<think>hm</think>{TWO}", wanted=wanted
    )
    assert not takes(HERMES, "else", wanted=wanted)


def test_without_reasoning_the_grammar_is_the_structure_alone():
    text = text_of("<tool_call> </think>")
    config = make_parser_config(find_chat_format(text), None, True, "")
    assert config is not None
    assert (
        make_answer_grammar(config, text, "<think></think>", ANSWER_RULE) == f"start: {ANSWER_RULE}"
    )
