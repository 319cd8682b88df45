"""Reasoning and calls told from content: whatever a model writes, however its text is cut."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_cases import OFFER, SHOWS, TOOLS, heard, parts, shown_with
from transformers.utils.chat_parsing import parse_response

from counterpoint.serve.output_parsing import chat_formats
from counterpoint.serve.output_parsing.chat_formats import (
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


def dialect(calls: dict | None, thoughts: dict | None = chat_formats.THINK) -> ChatFormat:
    spec = make_spec(thoughts, calls)
    return ChatFormat(spec, load_template(spec))


DIALECTS = {
    name: dialect(getattr(chat_formats, name))
    for name in ("HERMES", "QWEN_XML", "LLAMA", "MISTRAL", "MISTRAL_NAMED", "DEEPSEEK")
}


SPELLED = {  # two calls, as each dialect writes them
    "HERMES": '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "QWEN_XML": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    "LLAMA": '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "time", "parameters": {}}',
    "MISTRAL": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "time", "arguments": {}}]',
    "MISTRAL_NAMED": '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]time[ARGS]{}',
    "DEEPSEEK": f"{chat_formats.DEEPSEEK_BEGIN}{chat_formats.DEEPSEEK_CALL}function{chat_formats.DEEPSEEK_SEP}weather\n```json\n"
    f'{{"city": "Paris"}}\n```{chat_formats.DEEPSEEK_CALL_END}\n'
    f"{chat_formats.DEEPSEEK_CALL}time{chat_formats.DEEPSEEK_SEP}{{}}{chat_formats.DEEPSEEK_CALL_END}{chat_formats.DEEPSEEK_END}",
}


# ---------------------------------------------------------------- every family


@pytest.mark.parametrize("name", DIALECTS)
def test_reasoning_and_calls_of_each_family(name: str):
    reasoning, content, calls = heard(DIALECTS[name], SPELLED[name])
    assert (reasoning, content) == ("", "")
    assert [name for name, _ in calls] == ["weather", "time"]
    assert [msgspec.json.decode(arguments) for _, arguments in calls] == [{"city": "Paris"}, {}]
    if name != "LLAMA":  # its calls have no mark: they are all of the answer, or none
        text = f"<think>\nhm, Paris\n</think>\n\nLet me look.\n\n{SPELLED[name]}"
        assert heard(DIALECTS[name], text) == ("hm, Paris", "Let me look.", calls)


PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "</function>", "<parameter=days>", "</parameter>",
    "[TOOL_CALLS]", "[ARGS]", "weather", "<|python_tag|>", chat_formats.DEEPSEEK_BEGIN, chat_formats.DEEPSEEK_CALL, "function", chat_formats.DEEPSEEK_SEP,
    "\n```json\n", "\n```", chat_formats.DEEPSEEK_CALL_END, chat_formats.DEEPSEEK_END, '{"name": "weather", "arguments": ', '{"city": "Pa\\"r}is"}', "}",
    '{"name": "weather"}', '{"arguments": {}, "name": "time"}', '{"name": "unknown", "arguments": {}}', "{", '"', "\\", "[", "]",
    ",", ";", " ", "\n", "\n\n", "7", "null", "a", "<", "<tool", "</", "é漢😀", *SPELLED.values(),
]  # fmt: skip


@given(
    st.sampled_from(sorted(DIALECTS)),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
    st.sampled_from(["", "<think>"]),
)
@settings(max_examples=500, deadline=None)
def test_any_cutting_gives_the_same(name: str, text: str, cuts: list[int], whole: bool, begun: str):
    spoken = DIALECTS[name]
    at_once = heard(spoken, text, whole=whole, begun=begun)
    assert (
        heard(
            spoken, text, sorted(cut for cut in cuts if cut <= len(text)), whole=whole, begun=begun
        )
        == at_once
    )
    assert heard(spoken, text, list(range(len(text))), whole=whole, begun=begun) == at_once


@given(
    st.sampled_from(sorted(DIALECTS)),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_parts_come_in_order_and_none_is_empty(name: str, text: str, whole: bool):
    said = parts(DIALECTS[name], text, list(range(len(text))), whole=whole)
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
    st.sampled_from(sorted(DIALECTS)),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_what_has_no_call_and_no_reasoning_is_content_to_the_letter(
    name: str, text: str, whole: bool
):
    speech = merge_parts(parts(DIALECTS[name], text, whole=whole))
    if not speech.calls and "<think>" not in text:
        assert speech.content == text
    assert heard(dialect(None), text, offer=None, whole=whole)[2] == []


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
def test_a_good_answer_is_what_transformers_makes_of_it(
    thought: str, content: str, calls: list, cuts: list[int]
):
    bodies = [
        msgspec.json.encode({"name": name, "arguments": arguments}).decode()
        for name, arguments in calls
    ]
    body = "".join(f"<tool_call>{call}</tool_call>" for call in bodies)
    text = f"<think>{thought}</think>{content}{body}"
    spec = DIALECTS["HERMES"].spec
    whole = parse_response(text, spec, prefix="")
    reasoning, said, called = heard(
        DIALECTS["HERMES"], text, sorted(cut for cut in cuts if cut <= len(text))
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
    """In the manner of models that have special names for everything, no JSON proper, and channels."""
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
    spoken = find_chat_format(ModelTokenizer(byte.tokenizer, SHOWS, {}, spec))
    assert spoken.from_tokenizer and spoken.capabilities.supports_tools
    text = 'hm<channel|>Well.<|tool_call>call:weather{city: "Paris", days: 7}<tool_call|>'
    begun = chat_formats.find_answer_prefix(
        spoken, "<|turn>user\n<|channel>thought\n<turn|><|turn>model\n<|channel>thought\n", None
    )
    expected = ("hm", "Well.", [("weather", '{"city":"Paris","days":7}')])
    assert (
        heard(spoken, text, begun=begun)
        == expected
        == heard(spoken, text, list(range(len(text))), begun=begun)
    )
    assert heard(
        spoken.with_known_call_format(), f"hm<channel|>{SPELLED['HERMES']}", begun=begun
    ) == (
        "hm",
        "",
        [WEATHER, TIME],
    )
    broken = "<|tool_call>call:weather{city: <tool_call|>"
    assert heard(spoken, broken) == ("", broken, [])


def test_the_mark_that_begins_first_counts_even_if_another_is_whole_before():
    fields = {
        "reasoning_content": {"open": "b", "close": "."},
        "tool_calls": {"open_pattern": "a.{0,5}c", "content": "json"},
    }
    spec = {"start_anchor": "x", "fields": fields | {"content": {}}}
    spoken = ChatFormat(spec, load_template(spec))
    for text, expected in (("abxc{}", ("", "abxc{}", [])), ("abx, d.e", ("x, d", "ae", []))):
        assert heard(spoken, text) == expected == heard(spoken, text, list(range(len(text))))


def test_a_template_that_is_wrong_is_passed_over():
    byte = make_byte_tokenizer()
    spoken = find_chat_format(
        ModelTokenizer(byte.tokenizer, shown_with("<tool_call>"), {}, {"fields": {}})
    )
    assert not spoken.from_tokenizer and heard(spoken, SPELLED["HERMES"])[2] == [WEATHER, TIME]


@pytest.mark.parametrize(
    ("marks", "calls", "thoughts"),
    [
        ("<tool_call> </think>", "HERMES", "THINK"),
        ("<tool_call> <function=", "QWEN_XML", None),
        ("[TOOL_CALLS]", "MISTRAL", None),
        ("[TOOL_CALLS] [ARGS] [THINK] [/THINK]", "MISTRAL_NAMED", "THINK_BRACKETS"),
        ("<|python_tag|>", "LLAMA", None),
        (f"{chat_formats.DEEPSEEK_CALL} </think>", "DEEPSEEK", "THINK"),
        ("nothing", "HERMES", None),
    ],
)
def test_the_chat_template_says_which_dialect(marks: str, calls: str, thoughts: str | None):
    found = find_chat_format(ModelTokenizer(make_byte_tokenizer().tokenizer, shown_with(marks)))
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
        not unknown.capabilities.supports_tools
        and unknown.spec["fields"]["tool_calls"] is chat_formats.HERMES
    ), "it is told how to call"
    assert unknown.spec["fields"].get("reasoning_content") is found.spec["fields"].get(
        "reasoning_content"
    )


def test_special_tokens_of_marks_are_seen():
    text = make_byte_tokenizer()
    text.tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[INST]"])
    special = ModelTokenizer(text.tokenizer, shown_with("[TOOL_CALLS] [ARGS] [/THINK]"))
    spoken = find_chat_format(special)
    fields = spoken.template.fields
    named = {
        special.token_string(token) for token in spoken.marker_token_ids([fields["tool_calls"]])
    }
    assert named == {"[TOOL_CALLS]", "[ARGS]"}
    assert not spoken.marker_token_ids([fields["reasoning_content"]])


# ---------------------------------------------------------------- what is no call, and what is nearly one


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
def test_what_only_looks_like_a_call_is_content(text: str):
    assert heard(DIALECTS["HERMES"], text, whole=False) == ("", text, [])


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
        heard(DIALECTS["HERMES"], text)
        == ("", "", calls)
        == heard(DIALECTS["HERMES"], text, list(range(len(text))))
    )


def test_a_call_that_is_cut_short_is_given_as_far_as_it_goes():
    text = SPELLED["HERMES"]
    for end in range(len(text)):
        reasoning, content, calls = heard(DIALECTS["HERMES"], text[:end], whole=False)
        assert not reasoning
        for (name, arguments), (full_name, full_arguments) in zip(
            calls, [WEATHER, TIME], strict=False
        ):
            assert name == full_name and full_arguments.startswith(arguments)
        assert content == "" or text[:end].endswith(content), "what is no call yet is content"


def test_a_good_call_before_a_bad_one():
    text = SPELLED["HERMES"].replace('"time"', '"nothing"')
    _, content, calls = heard(DIALECTS["HERMES"], text)
    assert (
        calls == [WEATHER]
        and content == '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>'
    )


def test_arguments_go_out_as_they_come():
    said = '<tool_call>{"name": "weather", "arguments": {"city": "'
    hearing = make_parser_config(DIALECTS["HERMES"], OFFER, True, "")
    assert hearing is not None
    voice = hearing()
    (start, begun) = join_parts(voice.feed(said))
    assert (
        isinstance(start, CallStart)
        and start.name == "weather"
        and begun == CallArguments(0, '{"city": "')
    )
    assert voice.feed("Par") == [CallArguments(0, "Par")]


def test_one_call_where_no_more_are_wanted():
    for name, spoken in DIALECTS.items():
        single = AllowedTools(TOOLS, parallel=False)
        for cuts in ([], list(range(len(SPELLED[name])))):
            said = parts(spoken, SPELLED[name] + " and more", cuts, offer=single)
            assert [part.name for part in said if isinstance(part, CallStart)] == ["weather"], name
            assert not any(isinstance(part, ContentDelta) for part in said)


def test_nothing_is_called_where_nothing_is_offered():
    text = f"<think>a</think>{SPELLED['HERMES']}"
    assert heard(DIALECTS["HERMES"], text, offer=None) == ("a", SPELLED["HERMES"], [])
    assert make_parser_config(dialect(chat_formats.HERMES, None), None, True, "") is None, (
        "there is nothing to listen for"
    )


# ---------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("begun", "text", "reasoning", "content"),
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
def test_reasoning(begun: str, text: str, reasoning: str, content: str):
    said = heard(DIALECTS["HERMES"], text, begun=begun)
    assert (
        said
        == (reasoning, content, [])
        == heard(DIALECTS["HERMES"], text, list(range(len(text))), begun=begun)
    )


def test_reasoning_may_stay_in_the_content():
    text = "<think>a</think>b"
    assert heard(DIALECTS["HERMES"], text, reasoning=False) == ("", text, [])


@pytest.mark.parametrize("name", DIALECTS)
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
    said = parts(DIALECTS[name], text, list(range(0, len(text), 4)))
    assert said is not None
