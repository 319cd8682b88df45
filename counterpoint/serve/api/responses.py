"""Requests of OpenAI's /v1/responses, and their translation into chats.

Promises: a request that passes translates into a valid chat. What needs storage (earlier responses,
background work) is refused with what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Discriminator, Field, Tag

from counterpoint.serve.api.openai import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    Effort,
    Function,
    FunctionChoice,
    FunctionName,
    JsonSchema,
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

INCLUDE_LOGPROBS = "message.output_text.logprobs"
NOTHING_STORED = "nothing is stored here, send the earlier turns in input"
Identifier = Annotated[str, Field(max_length=512)]


class ItemText(StrictModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


class MessageItem(StrictModel):
    """A message. Its ids and states, echoed from earlier responses, are ignored."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ItemText]


class FunctionCallItem(StrictModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(StrictModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ItemText]


class ReasoningText(StrictModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """Earlier reasoning: `content` if there is any, else `summary`."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] = []
    content: list[ReasoningText] | None = None


def item_type(item: Any) -> str:
    kind = (
        item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    )
    return kind if isinstance(kind, str) else repr(kind)[:50]


def input_kind(given: Any) -> str:
    return "<text>" if isinstance(given, str) else "<items>"


ITEM_TYPES = "'message', 'function_call', 'function_call_output' or 'reasoning'"
Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(item_type, "unknown_item", f"type: Input should be {ITEM_TYPES}"),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)]
Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Items, Tag("<items>")], Discriminator(input_kind)
]


class TextFormat(StrictModel):
    """`schema` and the fields after it belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    @pydantic.model_validator(mode="after")
    def _schema_is_there(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema goes with type json_schema, and only with it")
        return self

    def to_response_format(self) -> ResponseFormat:
        schema = None
        if self.schema_ is not None:
            schema = JsonSchema(
                schema=self.schema_,
                name=self.name,
                description=self.description,
                strict=self.strict,
            )
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(StrictModel):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_tool(self) -> Tool:
        return Tool(
            type="function",
            function=Function(**self.model_dump(exclude={"type"}, exclude_unset=True)),
        )


class NamedTool(StrictModel):
    type: Literal["function"]
    name: FunctionName


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool | None = None


class ResponsesRequest(SampledRequest):
    """Beside OpenAI's own fields: those of SampledRequest, `stop` and `chat_template_kwargs`."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = SampledRequest.unsupported | {
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "max_tokens": (None,),
        "n": (None, 1),
        "previous_response_id": (None,),
        "prompt": (None,),
        "prompt_logprobs": (None,),
        "response_format": (None, {"type": "text"}),
        "truncation": (None, "disabled"),
    }
    unsupported_hints: ClassVar[dict[str, str]] = {
        "background": "leave it out, and stream what takes long",
        "conversation": NOTHING_STORED,
        "max_tokens": "use max_output_tokens",
        "n": "send the request several times",
        "previous_response_id": NOTHING_STORED,
        "prompt": NOTHING_STORED,
        "response_format": "use text.format",
        "truncation": "send what fits into the context",
    }
    names_of_chat_fields: ClassVar[dict[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text",
    }

    input: Input
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Identifier], Field(max_length=64)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[dict[Identifier, Identifier], Field(max_length=16)] | None = None
    user: Identifier | None = None
    safety_identifier: Identifier | None = None
    prompt_cache_key: Identifier | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def to_chat_request(self) -> ChatRequest:
        """The same request as a chat."""
        shared = {name: getattr(self, name) for name in SampledRequest.model_fields}
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            choice = ToolChoice(type="function", function=FunctionChoice(name=choice.name))
        return ChatRequest(
            **shared,
            messages=list(self._chat_messages()),
            max_completion_tokens=self.max_output_tokens,
            response_format=self.text.format.to_response_format()
            if self.text and self.text.format
            else None,
            stop=self.stop,
            tools=[tool.to_tool() for tool in self.tools or ()],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            logprobs=INCLUDE_LOGPROBS in (self.include or ()) or bool(self.top_logprobs),
            top_logprobs=self.top_logprobs,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def _chat_messages(self) -> Iterator[ChatMessage]:
        if self.instructions:
            yield ChatMessage(role="system", content=self.instructions)
        if isinstance(self.input, str):
            yield ChatMessage(role="user", content=self.input)
        else:
            yield from to_chat_messages(self.input)


def to_chat_messages(
    items: Iterable[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem],
) -> Iterator[ChatMessage]:
    """Consecutive reasoning, content and calls of the model become one assistant turn."""
    turn: ChatMessage | None = None  # of the assistant, while it may continue
    for item in items:
        from_assistant = isinstance(item, MessageItem) and item.role == "assistant"
        if turn is not None and not continues_turn(turn, item):
            yield turn
            turn = None
        if isinstance(item, FunctionCallOutputItem):
            yield ChatMessage(
                role="tool", content=to_text_parts(item.output), tool_call_id=item.call_id
            )
        elif isinstance(item, MessageItem) and not from_assistant:
            yield ChatMessage(role=item.role, content=to_text_parts(item.content))
        else:
            turn = turn or ChatMessage(role="assistant")
            add_to_turn(turn, item)
    if turn is not None:
        yield turn


def continues_turn(
    turn: ChatMessage, item: MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
) -> bool:
    if isinstance(item, FunctionCallItem):
        return True
    if isinstance(item, MessageItem) and item.role == "assistant":
        return turn.content is None and turn.tool_calls is None
    return False


def add_to_turn(turn: ChatMessage, item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    if isinstance(item, MessageItem):
        turn.content = to_text_parts(item.content)
    elif isinstance(item, ReasoningItem):
        turn.reasoning_content = "".join(thought.text for thought in item.content or item.summary)
    else:
        call = ToolCall(
            id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments)
        )
        turn.tool_calls = [*(turn.tool_calls or ()), call]
