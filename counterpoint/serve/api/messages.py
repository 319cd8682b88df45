"""Requests of Anthropic's /v1/messages, and their translation into chats.

Promises: a request that passes translates into a valid chat. Blocks of kinds that the model can't
read (images, documents) are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Discriminator, Field, Tag

from counterpoint.serve.api.openai import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    Function,
    FunctionChoice,
    FunctionName,
    JsonSchema,
    ModelRequest,
    ResponseFormat,
    SampledRequest,
    StopString,
    StrictModel,
    Tokens,
    Tool,
    ToolCall,
    ToolChoice,
    to_text_parts,
)


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str


class ThinkingBlock(StrictModel):
    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(StrictModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""


def get_role(turn: Any) -> str:
    role = turn.get("role") if isinstance(turn, dict) else getattr(turn, "role", None)
    return role if isinstance(role, str) else repr(role)[:50]


UserBlock = Annotated[TextBlock | ToolResultBlock, Discriminator("type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Discriminator("type")]


class UserTurn(StrictModel):
    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantTurn(StrictModel):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemTurn(StrictModel):
    role: Literal["system"]
    content: str | list[TextBlock]


Turn = Annotated[
    Annotated[UserTurn, Tag("user")]
    | Annotated[AssistantTurn, Tag("assistant")]
    | Annotated[SystemTurn, Tag("system")],
    Discriminator(
        get_role, "unknown_role", "role: Input should be 'user', 'assistant' or 'system'"
    ),
]


Turns = Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)]


class Thinking(StrictModel):
    """Whether the model should reason, if its template has that option. `budget_tokens` is no
    limit."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Tokens | None = None
    display: Literal["summarized"] | None = None


class Metadata(StrictModel):
    user_id: Annotated[str, Field(max_length=512)] | None = None


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """`effort` has no effect on the models known so far."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CustomTool(StrictModel):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def to_tool(self) -> Tool:
        described = self.model_dump(include={"name", "description", "strict"}, exclude_unset=True)
        return Tool(type="function", function=Function(**described, parameters=self.input_schema))


class AnthropicToolChoice(StrictModel):
    type: Literal["auto", "any", "none", "tool"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @pydantic.model_validator(mode="after")
    def _name_fits(self) -> AnthropicToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name goes with type tool, and only with it")
        return self

    def to_tool_choice(self) -> Literal["none", "auto", "required"] | ToolChoice:
        if self.name is not None:
            return ToolChoice(type="function", function=FunctionChoice(name=self.name))
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


UNSUPPORTED: dict[str, tuple[Any, ...]] = {"container": (None,), "mcp_servers": (None, [])}


Tools = Annotated[list[CustomTool], Field(max_length=MAX_TOOLS)]


class CountTokensRequest(ModelRequest):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED

    messages: Turns
    system: str | list[TextBlock] | None = None
    thinking: Thinking | None = None
    tools: Tools | None = None
    tool_choice: AnthropicToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(SampledRequest):
    """Beside Anthropic's own fields: those of SampledRequest, and `chat_template_kwargs`."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = (
        SampledRequest.unsupported
        | UNSUPPORTED
        | {
            "n": (None, 1),
            "prompt_logprobs": (None,),
            "response_format": (None, {"type": "text"}),
            "stop": (None, []),
        }
    )
    unsupported_hints: ClassVar[dict[str, str]] = {
        "n": "send the request several times",
        "response_format": "use output_config.format",
        "stop": "use stop_sequences",
    }
    names_of_chat_fields: ClassVar[dict[str, str]] = {"response_format": "output_config"}

    max_tokens: Tokens
    messages: Turns
    system: str | list[TextBlock] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    thinking: Thinking | None = None
    tools: Tools | None = None
    tool_choice: AnthropicToolChoice | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def to_chat_request(request: MessagesRequest) -> ChatRequest:
    """The same request as a chat, without `max_tokens`, which the caller applies."""
    shared = {name: getattr(request, name) for name in SampledRequest.model_fields}
    form = request.output_config.format if request.output_config is not None else None
    wanted = (
        None
        if form is None
        else ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema_))
    )
    choice = request.tool_choice or AnthropicToolChoice(type="auto")
    return ChatRequest(
        **shared,
        **to_chat_fields(request),
        stop=request.stop_sequences,
        response_format=wanted,
        tool_choice=choice.to_tool_choice(),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
    )


def to_chat_fields(request: MessagesRequest | CountTokensRequest) -> dict[str, Any]:
    """The fields of a chat that determine its prompt."""
    messages = list(to_chat_messages(request.system, request.messages))
    options = dict(request.chat_template_kwargs or {})
    if request.thinking is not None:
        options.setdefault("enable_thinking", request.thinking.type != "disabled")
    has_tools = request.tool_choice is None or request.tool_choice.type != "none"
    return {
        "messages": messages,
        "tools": [tool.to_tool() for tool in request.tools or ()] if has_tools else None,
        "chat_template_kwargs": options or None,
        # a last turn of the assistant is continued
        "continue_final_message": messages[-1].role == "assistant"
        and messages[-1].tool_calls is None,
    }


def to_chat_messages(
    system: str | list[TextBlock] | None, turns: Sequence[UserTurn | AssistantTurn | SystemTurn]
) -> Iterator[ChatMessage]:
    if system:
        yield ChatMessage(role="system", content=to_text_parts(system))
    for turn in turns:
        if isinstance(turn.content, str):
            yield ChatMessage(role=turn.role, content=turn.content)
        elif isinstance(turn, AssistantTurn):
            yield to_assistant_message(turn.content)
        else:
            yield from to_user_messages(turn.role, turn.content)


def to_assistant_message(blocks: Sequence[TextBlock | ThinkingBlock | ToolUseBlock]) -> ChatMessage:
    calls = [
        ToolCall(id=block.id, function=CalledFunction(name=block.name, arguments=block.input))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    text_blocks = [block for block in blocks if isinstance(block, TextBlock)]
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return ChatMessage(
        role="assistant",
        content=to_text_parts(text_blocks) if text_blocks else None,
        reasoning_content=thinking or None,
        tool_calls=calls or None,
    )


def to_user_messages(
    role: Literal["user", "system"], blocks: Sequence[TextBlock | ToolResultBlock]
) -> Iterator[ChatMessage]:
    """Tool results become turns of their own, before the text."""
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    text_blocks = [block for block in blocks if isinstance(block, TextBlock)]
    for result in results:
        yield ChatMessage(
            role="tool", content=to_text_parts(result.content), tool_call_id=result.tool_use_id
        )
    if text_blocks or not results:
        yield ChatMessage(role=role, content=to_text_parts(text_blocks))
