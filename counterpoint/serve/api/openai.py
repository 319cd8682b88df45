"""Requests of the OpenAI API as types: every field's type, range and default.

Promises: a request that passes is safe to act on. Unknown fields are ignored, as OpenAI does; a
known field that would change the answer and is not supported is an error. Must not: know the model;
vocabulary and context are checked in text/engine_requests.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol

import pydantic
from pydantic import BaseModel, ConfigDict, Field

MAX_CHOICES = 128
MAX_CHOICE_TEXTS = 4096
MAX_PROMPTS = 2048
MAX_MESSAGES = 2**14
MAX_PROMPT_TOKENS = 2**21  # longer than any context
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1024
MAX_BIASES = 1024
MAX_TOOLS = 1024
MAX_TOP_LOGPROBS = 20
MAX_TARGET_S = 86_400
MAX_TEXT_CHARACTERS = 2**22  # of a text for /tokenize: bounds the memory of its tokens
MAX_TOKENS = 2**31 - 1


Penalty = Annotated[float, Field(ge=-2, le=2)]
TargetSeconds = Annotated[float, Field(gt=0, le=MAX_TARGET_S)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
Schema = dict[str, Any] | str
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_CHOICE_TEXTS, fail_fast=True)
]
Prompts = Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
TokenPrompts = Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]


class StrictModel(BaseModel):
    """Converts no value to another type, and accepts no number that JSON does not have."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SloFields(StrictModel):
    """Latency targets of one request in seconds; the server's defaults hold where there is none. An
    unknown name is an error, since that target would have no effect."""

    model_config = ConfigDict(extra="forbid")

    ttft_s: TargetSeconds | None = None
    tpot_s: TargetSeconds | None = None
    itl_s: TargetSeconds | None = None


class JsonSchema(StrictModel):
    """With `strict` false, keywords that can't be enforced are ignored."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """Some clients send `schema` beside json_object, as others send a json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    @pydantic.model_validator(mode="after")
    def _schema_fits_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type json_schema, and only with it")
        return self


class StructuredOutputs(StrictModel):
    """The answer must be one of: JSON by a schema (an object or its JSON text), a full match of a
    regular expression, one of several texts, a text of a grammar (llguidance's Lark or GBNF), any
    JSON object."""

    model_config = ConfigDict(extra="forbid")

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ModelRequest(StrictModel):
    """The base of every request."""

    model_config = ConfigDict(extra="ignore")
    # Known fields that would change the answer: name -> values that do not change it.
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}
    # What to do instead, by the name of an unsupported field.
    unsupported_hints: ClassVar[dict[str, str]] = {}
    # Field of /v1/chat/completions -> its name in this API, where it differs.
    names_of_chat_fields: ClassVar[dict[str, str]] = {}

    model: str | None = None


class SampledRequest(ModelRequest):
    """The fields of every request that generates, in any API. Beside OpenAI's own: top_k, min_p,
    repetition_penalty, stop_token_ids, ignore_eos, min_tokens, include_stop_str_in_output,
    skip_special_tokens, priority, cache_salt, slo, and one structure (see StructuredOutputs)."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_token_ids": (None, []),
        "bad_words": (None, []),
        "chat_template": (None,),
        "guided_decoding_backend": (None, "", "auto"),
        "guided_whitespace_pattern": (None, ""),
        "length_penalty": (None, 1, 1.0),
        "return_token_ids": (None, False),
        "return_tokens_as_token_ids": (None, False),
        "truncate_prompt_tokens": (None,),
        "use_beam_search": (None, False),
    }

    stream: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    slo: SloFields | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_schema: Schema | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


class GenerationRequest(SampledRequest):
    """The base of chat and completions."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    response_format: ResponseFormat | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @pydantic.model_validator(mode="after")
    def _fields_fit_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs can't be streamed: leave stream out")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def usage_at_end(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class HasText(Protocol):
    text: str


def to_text_parts(content: str | Sequence[HasText]) -> str | list[TextPart]:
    """Text parts of another API as those of chat."""
    return (
        content
        if isinstance(content, str)
        else [TextPart(type="text", text=part.text) for part in content]
    )


class CalledFunction(StrictModel):
    """`arguments`: JSON text, as OpenAI has it, or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(StrictModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(StrictModel):
    """A tool. `parameters` is a JSON schema; None means an object without members."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class FunctionChoice(StrictModel):
    name: FunctionName


class ToolChoice(StrictModel):
    """Forces the tool of that name."""

    type: Literal["function"]
    function: FunctionChoice


class ChatMessage(StrictModel):
    """One turn. `content` may be null beside tool calls; its parts must be text. Reasoning comes as
    `reasoning_content` or `reasoning`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    def to_template_message(self) -> dict[str, Any]:
        """As chat templates expect it: content is one string, "developer" becomes "system"."""
        content = (
            self.content
            if isinstance(self.content, str | None)
            else "\n".join(part.text for part in self.content)
        )
        if content is None and self.tool_calls is None:
            content = ""
        role = "system" if self.role == "developer" else self.role
        reasoning = self.reasoning_content or self.reasoning
        known = {"reasoning_content": reasoning} if reasoning else {}
        return (
            self.model_dump(exclude_none=True, exclude={"reasoning"})
            | known
            | {"role": role, "content": content}
        )


class ChatRequest(GenerationRequest):
    """`separate_reasoning` false leaves reasoning and its markers in the content, where stop
    strings apply. `include_reasoning` false drops it from the response. `reasoning_effort` goes to
    the chat template, which may ignore it."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.unsupported | {
        "audio": (None,),
        "documents": (None, []),
        "function_call": (None, "none", "auto"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "web_search_options": (None,),
    }

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @pydantic.model_validator(mode="after")
    def _fields_fit(self) -> ChatRequest:
        if self.max_tokens == 0:
            raise ValueError("max_tokens must be at least 1")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


class CompletionRequest(GenerationRequest):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.unsupported | {
        "best_of": (None, 1),
        "prompt_embeds": (None,),
        "suffix": (None, ""),
    }

    prompt: str | Prompts | TokenIds | TokenPrompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @pydantic.model_validator(mode="after")
    def _no_duplicate_logprobs(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None and self.prompt_logprobs is not None:
            raise ValueError(
                "prompt_logprobs: echo with logprobs returns them already, leave it out"
            )
        return self


class TokenizeRequest(ModelRequest):
    """A text, or a conversation that the chat template renders."""

    prompt: Annotated[str, Field(max_length=MAX_TEXT_CHARACTERS)] | None = None
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"chat_template": (None,)}

    @pydantic.model_validator(mode="after")
    def _prompt_or_messages(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(ModelRequest):
    tokens: TokenIds
