"""Reasoning and calls are separated from content, whatever a model writes and however it is cut."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_cases import ALLOWED_TOOLS, SHOWS_ALL, TOOLS, parse_parts, parse_text, template_with
from transformers.utils.chat_parsing import parse_response

from counterpoint.serve.output_parsing import chat_formats
from counterpoint.serve.output_parsing.chat_formats import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEP,
    HERMES,
    THINK,
    ChatFormat,
    find_chat_format,
    load_template,
    make_spec,
)
from counterpoint.serve.output_parsing.output_parser import (
    CallArguments,
    CallStart,
    ContentDelta,
    join_parts,
    merge_parts,
)
from counterpoint.serve.output_parsing.streaming_parser import make_parser_config
from counterpoint.serve.output_parsing.tool_call_parser import AllowedTools
from counterpoint.serve.text.tokenizer import ModelTokenizer
from counterpoint.serve.text.tokenizer_loader import make_byte_tokenizer

WEATHER = ("weather", '{"city": "Paris"}')
TIME = ("time", "{}")


def make_chat_format(calls: dict | None, reasoning: dict | None = THINK) -> ChatFormat:
    spec = make_spec(reasoning, calls)
    return ChatFormat(spec, load_template(spec))


CHAT_FORMATS = {
    name: make_chat_format(getattr(chat_formats, name))
    for name in ("HERMES", "QWEN_XML", "LLAMA", "MISTRAL", "MISTRAL_NAMED", "DEEPSEEK")
}


CALL_TEXTS = {  # two calls, as each format writes them
    "HERMES": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "QWEN_XML": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>\n"
    "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    "LLAMA": '{"name": "weather", "parameters": {"city": "Paris"}}; '
    '{"name": "time", "parameters": {}}',
    "MISTRAL": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, '
    '{"name": "time", "arguments": {}}]',
    "MISTRAL_NAMED": '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]time[ARGS]{}',
    "DEEPSEEK": f"{DEEPSEEK_BEGIN}{DEEPSEEK_CALL}function{DEEPSEEK_SEP}weather\n```json\n"
    f'{{"city": "Paris"}}\n```{DEEPSEEK_CALL_END}\n'
    f"{DEEPSEEK_CALL}time{DEEPSEEK_SEP}{{}}{DEEPSEEK_CALL_END}{DEEPSEEK_END}",
}


# ---------------------------------------------------------------- every family


@pytest.mark.parametrize("name", CHAT_FORMATS)
def test_reasoning_and_calls_of_each_family(name: str):
    reasoning, content, calls = parse_text(CHAT_FORMATS[name], CALL_TEXTS[name])
    assert (reasoning, content) == ("", "")
    assert [name for name, _ in calls] == ["weather", "time"]
    assert [msgspec.json.decode(arguments) for _, arguments in calls] == [{"city": "Paris"}, {}]
    if name != "LLAMA":  # its calls have no mark: they are all of the answer, or none
        text = f"<think>\nhm, Paris\n</think>\n\nLet me look.\n\n{CALL_TEXTS[name]}"
        assert parse_text(CHAT_FORMATS[name], text) == ("hm, Paris", "Let me look.", calls)


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "</function>",
    "<parameter=days>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "weather", "<|python_tag|>",
    DEEPSEEK_BEGIN, DEEPSEEK_CALL, "function", DEEPSEEK_SEP, "\n```json\n", "\n```",
    DEEPSEEK_CALL_END, DEEPSEEK_END, '{"name": "weather", "arguments": ', '{"city": "Pa\\"r}is"}',
    "}", '{"name": "weather"}', '{"arguments": {}, "name": "time"}',
    '{"name": "unknown", "arguments": {}}', "{", '"', "\\", "[", "]", ",", ";", " ", "\n", "\n\n",
    "7", "null", "a", "<", "<tool", "</", "é漢😀", *CALL_TEXTS.values(),
]  # fmt: skip


@given(
    st.sampled_from(sorted(CHAT_FORMATS)),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
    st.sampled_from(["", "<think>"]),
)
@settings(max_examples=500, deadline=None)
def test_parts_do_not_depend_on_how_text_is_cut(
    name: str, text: str, cuts: list[int], complete: bool, answer_prefix: str
):
    chat_format = CHAT_FORMATS[name]
    at_once = parse_text(chat_format, text, complete=complete, answer_prefix=answer_prefix)
    assert (
        parse_text(
            chat_format,
            text,
            sorted(cut for cut in cuts if cut <= len(text)),
            complete=complete,
            answer_prefix=answer_prefix,
        )
        == at_once
    )
    assert (
        parse_text(
            chat_format,
            text,
            list(range(len(text))),
            complete=complete,
            answer_prefix=answer_prefix,
        )
        == at_once
    )


@given(
    st.sampled_from(sorted(CHAT_FORMATS)),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_parts_come_in_order_and_none_is_empty(name: str, text: str, complete: bool):
    said = parse_parts(CHAT_FORMATS[name], text, list(range(len(text))), complete=complete)
    started = [part.index for part in said if isinstance(part, CallStart)]
    assert started == list(range(len(started)))
    current = -1
    for part in said:
        if isinstance(part, CallStart):
            current = part.index
        elif isinstance(part, CallArguments):
            assert part.index == current
        assert isinstance(part, CallStart) or part.text
    assert merge_parts(join_parts(said)) == merge_parts(said)


@given(
    st.sampled_from(sorted(CHAT_FORMATS)),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_text_without_regions_is_unchanged_content(name: str, text: str, complete: bool):
    output = merge_parts(parse_parts(CHAT_FORMATS[name], text, complete=complete))
    if not output.calls and "<think>" not in text:
        assert output.content == text
    assert parse_text(make_chat_format(None), text, allowed_tools=None, complete=complete)[2] == []


# ---------------------------------------------------------------- the library as the oracle

ARGUMENTS = st.dictionaries(
    st.sampled_from(["city", "a b"]),
    st.text(st.characters(exclude_characters="<>", exclude_categories=["Cs"]), max_size=8),
    max_size=2,
)
CALLS = st.lists(st.tuples(st.sampled_from(["weather", "time"]), ARGUMENTS), max_size=3)
WORDS = st.text(
    st.characters(exclude_characters="<>{}[]\\", exclude_categories=["Cs"]), max_size=20
).map(str.strip)


@given(WORDS, WORDS, CALLS, st.lists(st.integers(0, 300), max_size=8))
@settings(max_examples=300, deadline=None)
def test_a_well_formed_answer_parses_as_in_transformers(
    thought: str, content: str, calls: list, cuts: list[int]
):
    bodies = [
        msgspec.json.encode({"name": name, "arguments": arguments}).decode()
        for name, arguments in calls
    ]
    body = "".join(f"<tool_call>{call}</tool_call>" for call in bodies)
    text = f"<think>{thought}</think>{content}{body}"
    spec = CHAT_FORMATS["HERMES"].spec
    whole = parse_response(text, spec, prefix="")
    reasoning, said, called = parse_text(
        CHAT_FORMATS["HERMES"], text, sorted(cut for cut in cuts if cut <= len(text))
    )
    assert reasoning == whole.get("reasoning_content", "") and said.strip() == whole.get(
        "content", ""
    )
    expected = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in whole.get("tool_calls", [])
    ]
    assert [(name, msgspec.json.decode(arguments)) for name, arguments in called] == expected


def test_a_template_that_comes_with_the_tokeniser():
    """A template with its own field names, unquoted JSON keys, and channels."""
    spec = {
        "start_anchor": "<|turn>model\n",
        "fields": {
            "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True},
                "transform": {
                    "type": "function",
                    "function": {"name": "{name}", "arguments": "{content}"},
                },
            },
            "content": {"close": ["<turn|>"]},
        },
    }
    byte = make_byte_tokenizer()
    chat_format = find_chat_format(ModelTokenizer(byte.tokenizer, SHOWS_ALL, {}, spec))
    assert chat_format.from_tokenizer and chat_format.capabilities.supports_tools
    text = 'hm<channel|>Well.<|tool_call>call:weather{city: "Paris", days: 7}<tool_call|>'
    answer_prefix = chat_formats.find_answer_prefix(
        chat_format,
        "<|turn>user\n<|channel>thought\n<turn|><|turn>model\n<|channel>thought\n",
        None,
    )
    expected = ("hm", "Well.", [("weather", '{"city":"Paris","days":7}')])
    assert (
        parse_text(chat_format, text, answer_prefix=answer_prefix)
        == expected
        == parse_text(chat_format, text, list(range(len(text))), answer_prefix=answer_prefix)
    )
    assert parse_text(
        chat_format.with_known_call_format(),
        f"hm<channel|>{CALL_TEXTS['HERMES']}",
        answer_prefix=answer_prefix,
    ) == (
        "hm",
        "",
        [WEATHER, TIME],
    )
    broken = "<|tool_call>call:weather{city: <tool_call|>"
    assert parse_text(chat_format, broken) == ("", broken, [])


def test_the_marker_that_begins_first_wins():
    fields = {
        "reasoning_content": {"open": "b", "close": "."},
        "tool_calls": {"open_pattern": "a.{0,5}c", "content": "json"},
    }
    spec = {"start_anchor": "x", "fields": fields | {"content": {}}}
    chat_format = ChatFormat(spec, load_template(spec))
    for text, expected in (("abxc{}", ("", "abxc{}", [])), ("abx, d.e", ("x, d", "ae", []))):
        assert (
            parse_text(chat_format, text)
            == expected
            == parse_text(chat_format, text, list(range(len(text))))
        )


def test_an_invalid_response_template_is_ignored():
    byte = make_byte_tokenizer()
    chat_format = find_chat_format(
        ModelTokenizer(byte.tokenizer, template_with("<tool_call>"), {}, {"fields": {}})
    )
    assert not chat_format.from_tokenizer and parse_text(chat_format, CALL_TEXTS["HERMES"])[2] == [
        WEATHER,
        TIME,
    ]


@pytest.mark.parametrize(
    ("marks", "calls", "thoughts"),
    [
        ("<tool_call> </think>", "HERMES", "THINK"),
        ("<tool_call> <function=", "QWEN_XML", None),
        ("[TOOL_CALLS]", "MISTRAL", None),
        ("[TOOL_CALLS] [ARGS] [THINK] [/THINK]", "MISTRAL_NAMED", "THINK_BRACKETS"),
        ("<|python_tag|>", "LLAMA", None),
        (f"{DEEPSEEK_CALL} </think>", "DEEPSEEK", "THINK"),
        ("nothing", "HERMES", None),
    ],
)
def test_the_chat_template_selects_the_format(marks: str, calls: str, thoughts: str | None):
    found = find_chat_format(ModelTokenizer(make_byte_tokenizer().tokenizer, template_with(marks)))
    assert found.capabilities.supports_tools and found.spec["fields"]["tool_calls"] is getattr(
        chat_formats, calls
    )
    assert found.spec["fields"].get("reasoning_content") is (
        getattr(chat_formats, thoughts) if thoughts else None
    )
    unknown = find_chat_format(
        ModelTokenizer(
            make_byte_tokenizer().tokenizer, "{{ messages[0].content }}{# " + marks + " #}"
        )
    )
    assert (
        not unknown.capabilities.supports_tools and unknown.spec["fields"]["tool_calls"] is HERMES
    ), "it is told how to call"
    assert unknown.spec["fields"].get("reasoning_content") is found.spec["fields"].get(
        "reasoning_content"
    )


def test_special_tokens_of_marks_are_seen():
    text = make_byte_tokenizer()
    text.tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[INST]"])
    special = ModelTokenizer(text.tokenizer, template_with("[TOOL_CALLS] [ARGS] [/THINK]"))
    chat_format = find_chat_format(special)
    fields = chat_format.template.fields
    named = {
        special.token_string(token)
        for token in chat_format.marker_token_ids([fields["tool_calls"]])
    }
    assert named == {"[TOOL_CALLS]", "[ARGS]"}
    assert not chat_format.marker_token_ids([fields["reasoning_content"]])


# ---------------------------------------------------------------- text that is no call


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no json</tool_call>",
        'Look: <tool_call>{"name": "unknown", "arguments": {}}</tool_call> is what it wrote.',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>\n",
        '<tool_call>{"name": "weat',
        '<tool_call>{"arguments": {}, "name": "weather"',
        " \n<tool_call",
        "<tool_call>" + "[" * 5000,
        '<tool_call>{"name": "' + "weather" * 300 + '", "arguments": {}}</tool_call>',
    ],
)
def test_text_that_only_looks_like_a_call_is_content(text: str):
    assert parse_text(CHAT_FORMATS["HERMES"], text, complete=False) == ("", text, [])


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ('{"name": "weather", "arguments": {"city": "Paris"}}', [WEATHER]),
        ('{"name": "weather", "parameters": {"city": "Paris"}, "id": "1"}', [WEATHER]),
        ('{"arguments": {"city": "Paris"}, "name": "weather"}', [WEATHER]),
        (
            '[{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time"}]',
            [WEATHER, TIME],
        ),
        ('{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', [WEATHER]),
        ('{"name": "time", "arguments": null}', [TIME]),
        ('{"name": "time", "arguments": ""}', [TIME]),
        (
            '{"name": "weather", "arguments": {"city": "</think> }\\" {"}}',
            [("weather", '{"city": "</think> }\\" {"}')],
        ),
        ('{"name": "weather", "arguments": {"city": Paris}}', [("weather", '{"city": Paris}')]),
        ('{"name": "weather", "arguments": [1]}', [("weather", "[1]")]),
    ],
)
def test_calls_as_models_write_them(said: str, calls: list):
    text = f"<tool_call>{said}</tool_call>"
    assert (
        parse_text(CHAT_FORMATS["HERMES"], text)
        == ("", "", calls)
        == parse_text(CHAT_FORMATS["HERMES"], text, list(range(len(text))))
    )


def test_a_call_that_is_cut_short_is_returned_as_far_as_it_goes():
    text = CALL_TEXTS["HERMES"]
    for end in range(len(text)):
        reasoning, content, calls = parse_text(CHAT_FORMATS["HERMES"], text[:end], complete=False)
        assert not reasoning
        for (name, arguments), (full_name, full_arguments) in zip(
            calls, [WEATHER, TIME], strict=False
        ):
            assert name == full_name and full_arguments.startswith(arguments)
        assert content == "" or text[:end].endswith(content), "what is no call yet is content"


def test_a_good_call_before_a_bad_one():
    text = CALL_TEXTS["HERMES"].replace('"time"', '"nothing"')
    _, content, calls = parse_text(CHAT_FORMATS["HERMES"], text)
    assert (
        calls == [WEATHER]
        and content == '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'
    )


def test_arguments_stream_as_they_come():
    said = '<tool_call>{"name": "weather", "arguments": {"city": "'
    hearing = make_parser_config(CHAT_FORMATS["HERMES"], ALLOWED_TOOLS, True, "")
    assert hearing is not None
    voice = hearing()
    (start, answer_prefix) = join_parts(voice.feed(said))
    assert (
        isinstance(start, CallStart)
        and start.name == "weather"
        and answer_prefix == CallArguments(0, '{"city": "')
    )
    assert voice.feed("Par") == [CallArguments(0, "Par")]


def test_without_parallel_there_is_one_call():
    for name, chat_format in CHAT_FORMATS.items():
        single = AllowedTools(TOOLS, parallel=False)
        for cuts in ([], list(range(len(CALL_TEXTS[name])))):
            said = parse_parts(
                chat_format, CALL_TEXTS[name] + " and more", cuts, allowed_tools=single
            )
            assert [part.name for part in said if isinstance(part, CallStart)] == ["weather"], name
            assert not any(isinstance(part, ContentDelta) for part in said)


def test_without_tools_there_are_no_calls():
    text = f"<think>a</think>{CALL_TEXTS['HERMES']}"
    assert parse_text(CHAT_FORMATS["HERMES"], text, allowed_tools=None) == (
        "a",
        CALL_TEXTS["HERMES"],
        [],
    )
    assert make_parser_config(make_chat_format(HERMES, None), None, True, "") is None, (
        "there is nothing to listen for"
    )


# ---------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("answer_prefix", "text", "reasoning", "content"),
    [
        ("", "<think>\na\n</think>\n\nb\n", "a", "b\n"),
        ("<think>", "\na\n</think>\n\nb", "a", "b"),
        ("<think>\n\n</think>\n\n", "b", "", "b"),
        ("", " plain \n", "", " plain \n"),
        ("", "<think>never ends", "never ends", ""),
        ("", "a <think>b</think> c <think>d</think>", "bd", "a  c"),
        ("half an answer", " and the rest ", "", " and the rest "),
    ],
)
def test_reasoning(answer_prefix: str, text: str, reasoning: str, content: str):
    said = parse_text(CHAT_FORMATS["HERMES"], text, answer_prefix=answer_prefix)
    assert (
        said
        == (reasoning, content, [])
        == parse_text(
            CHAT_FORMATS["HERMES"], text, list(range(len(text))), answer_prefix=answer_prefix
        )
    )


def test_reasoning_may_stay_in_the_content():
    text = "<think>a</think>b"
    assert parse_text(CHAT_FORMATS["HERMES"], text, reasoning=False) == ("", text, [])


@pytest.mark.parametrize("name", CHAT_FORMATS)
@pytest.mark.parametrize(
    "nasty",
    [
        "\n",
        " \n<",
        "<tool_call>",
        "<parameter=a>",
        "[TOOL_CALLS]a",
        "{",
        '{"name": "weather", "arguments": "',
    ],
)
def test_the_work_for_a_character_is_bounded(name: str, nasty: str):
    """Patterns that look again at all that was held would take minutes for this."""
    text = nasty * (40_000 // len(nasty))
    said = parse_parts(CHAT_FORMATS[name], text, list(range(0, len(text), 4)))
    assert said is not None
