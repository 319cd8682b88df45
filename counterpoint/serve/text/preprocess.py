"""From an API request to what the engine gets: templates, tokenising, structures.

Promises: the engine accepts what is prepared here; long texts are tokenised off the event loop,
and texts that can't fit into the context are not tokenised at all.
Must not: talk to the engine, or shape a response.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from counterpoint.config import SchedulerConfig
from counterpoint.serve.api.errors import ApiError
from counterpoint.serve.api.openai import (
    MAX_TEXT_CHARACTERS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from counterpoint.serve.output_parsing.chat_formats import (
    ChatFormat,
    find_answer_prefix,
    find_chat_format,
)
from counterpoint.serve.output_parsing.streaming_parser import ParserConfig, make_parser_config
from counterpoint.serve.output_parsing.tools import (
    find_allowed_tools,
    make_answer_grammar,
    make_template_messages,
    must_call,
    validate_tools,
)
from counterpoint.serve.structured_output.checker import (
    GrammarChecker,
    WantedStructure,
    find_structure,
)
from counterpoint.serve.structured_output.grammar import ANSWER_RULE
from counterpoint.serve.text.engine_requests import (
    EndpointSettings,
    EngineRequestBuilder,
    PreparedRequest,
    TokenizedPrompt,
    check_prompt_logprobs,
)
from counterpoint.serve.text.tokenizer import ModelTokenizer, TokenizerError
from counterpoint.serve.worker.wire import EngineInfo

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI has it
INLINE_CHARACTERS = 4096  # longer texts are tokenised in another thread
# Options of the template renderer that clients may not set.
RESERVED_TEMPLATE_OPTIONS = frozenset(
    (
        "self",
        "messages",
        "conversations",
        "chat_template",
        "tools",
        "tokenize",
        "return_assistant_tokens_mask",
    )
)

Json = dict[str, Any]
Result = TypeVar("Result")
encode = msgspec.json.encode


class Preprocessor:
    """`model_name` is the name in the API; `scheduler` has the default latency targets."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        engine_info: EngineInfo,
        model_name: str,
        checker: GrammarChecker,
        scheduler: SchedulerConfig = SchedulerConfig(),
    ) -> None:
        self.tokenizer = tokenizer
        self.checker = checker
        self.model_name = model_name
        self.context_tokens = min(engine_info.max_context_tokens, engine_info.kv_tokens)
        self.builder = EngineRequestBuilder(
            model_name, engine_info.vocab, self.context_tokens, scheduler
        )

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """Takes seconds on first use: not on the event loop."""
        return find_chat_format(self.tokenizer)

    async def _load_chat_format(self) -> None:
        if "chat_format" not in vars(self):
            await asyncio.to_thread(lambda: self.chat_format)

    # ------------------------------------------------------------ the endpoints

    async def prepare_chat(
        self, request: ChatRequest, id_prefix: str = "chatcmpl-", max_tokens: int | None = None
    ) -> PreparedRequest:
        """`max_tokens`: a limit that, unlike the request's own, may be cut to the context."""
        self.check_model(request.model)
        await self._load_chat_format()
        tools = validate_tools(request)
        prompt = await run_in_thread_if_large(
            self._encode_chat,
            count_characters(request),
            request.messages,
            tools,
            make_template_options(request),
        )
        settings = EndpointSettings(
            id_prefix,
            param="messages",
            max_tokens=request.max_completion_tokens or request.max_tokens,
            default_max_tokens=max_tokens or self.context_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        prepared = self.builder.build(request, [prompt], settings)
        text = prompt.text or ""
        config = self._make_parser_config(request, tools, text)
        prepared = await self._with_grammar(prepared, self._find_structure(request, config, text))
        if config is None:
            return prepared
        options = dataclasses.replace(
            prepared.output_options,
            make_parser=config,
            parser_token_ids=config.chat_format.marker_token_ids(config.fields),
        )
        return dataclasses.replace(prepared, output_options=options)

    async def prepare_completion(self, request: CompletionRequest) -> PreparedRequest:
        self.check_model(request.model)
        prompts = await self._tokenize_prompts(request.prompt)
        settings = EndpointSettings(
            "cmpl-",
            param="prompt",
            max_tokens=request.max_tokens,
            default_max_tokens=DEFAULT_COMPLETION_TOKENS,
            logprobs=request.logprobs,
        )
        prepared = self.builder.build(request, prompts, settings)
        if request.echo and request.logprobs is not None:
            check_prompt_logprobs(prompts, prepared.n, request.logprobs, "logprobs")
            prepared = prepared.with_sampling(prompt_logprobs=request.logprobs)
        return await self._with_grammar(prepared, find_structure(request))

    async def tokenize(self, request: TokenizeRequest) -> bytes:
        """The body of /tokenize's response. Raises ApiError."""
        tokens = await self.tokenize_prompt(request)
        return await run_in_thread_if_large(self._encode_tokens, len(tokens), request, tokens)

    async def tokenize_prompt(self, request: TokenizeRequest) -> list[int]:
        """Raises ApiError."""
        self.check_model(request.model)
        await self._load_chat_format()
        return await run_in_thread_if_large(self._token_ids, count_characters(request), request)

    async def detokenize(self, request: DetokenizeRequest) -> bytes:
        """The body of /detokenize's response. Raises ApiError."""
        self.check_model(request.model)
        self.builder.check_token_ids(request.tokens, "tokens")
        return await run_in_thread_if_large(self._encode_text, len(request.tokens), request.tokens)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            message = f"the model {name[:200]!r} does not exist: this is {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    # ------------------------------------------------------------ structure

    def _make_parser_config(
        self, request: ChatRequest, tools: list[Json], prompt: str
    ) -> ParserConfig | None:
        chat_format = self.chat_format
        if must_call(request):
            chat_format = chat_format.with_known_call_format()
        continued = None
        if request.continue_final_message:
            continued = str(request.messages[-1].to_template_message()["content"] or "")
        return make_parser_config(
            chat_format,
            find_allowed_tools(request, tools, chat_format),
            request.separate_reasoning is not False,
            find_answer_prefix(chat_format, prompt, continued),
        )

    def _find_structure(
        self, request: ChatRequest, config: ParserConfig | None, prompt: str
    ) -> WantedStructure | None:
        """The structure of the answer after reasoning. Raises ApiError if two are given."""
        wanted = find_structure(request)
        if must_call(request):
            # response_format is only for answers without calls: a forced call overrides it
            if wanted is not None and wanted.param != "response_format":
                message = f"{wanted.param} beside a tool_choice that forces a call: give one"
                raise ApiError(400, message, param=wanted.param)
            assert config is not None
            grammar = make_answer_grammar(config, self.tokenizer, prompt)
            return WantedStructure("lark", grammar, "tools")
        if wanted is None or config is None:
            return wanted
        outer = make_answer_grammar(config, self.tokenizer, prompt, alternative=ANSWER_RULE)
        return wanted if outer == f"start: {ANSWER_RULE}" else replace(wanted, outer_grammar=outer)

    async def _with_grammar(
        self, prepared: PreparedRequest, structure: WantedStructure | None
    ) -> PreparedRequest:
        """Raises ApiError if the structure can't be enforced."""
        if structure is None:
            return prepared
        return prepared.with_sampling(grammar=await self.checker.check(structure))

    # ------------------------------------------------------------ prompts

    def _encode_chat(
        self, messages: Sequence[ChatMessage], tools: list[Json], options: Json
    ) -> TokenizedPrompt:
        """Raises ApiError if the template fails, or if the prompt is much too long."""
        text = self._render_chat(messages, tools, options)
        return self._encode_texts([text], False, "messages")[0]

    def _render_chat(
        self, messages: Sequence[ChatMessage], tools: list[Json], options: Json
    ) -> str:
        turns, tool_options = make_template_messages(messages, tools, self.chat_format)
        try:
            return self.tokenizer.apply_chat_template(turns, **options, **tool_options)
        except TokenizerError as error:
            raise ApiError(400, str(error), param="messages") from None

    def _encode_tokens(self, request: TokenizeRequest, tokens: list[int]) -> bytes:
        strings = None
        if request.return_token_strs:
            strings = [self.tokenizer.token_string(token) for token in tokens]
        return encode(
            {
                "count": len(tokens),
                "max_model_len": self.context_tokens,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    def _token_ids(self, request: TokenizeRequest) -> list[int]:
        if request.messages is None:
            text, add_special_tokens = request.prompt or "", request.add_special_tokens is not False
        else:
            options = make_template_options(request)
            text = self._render_chat(request.messages, validate_tools(request), options)
            add_special_tokens = bool(request.add_special_tokens)
        if len(text) > MAX_TEXT_CHARACTERS:
            message = f"the conversation has {len(text)} characters: at most {MAX_TEXT_CHARACTERS}"
            raise ApiError(400, f"{message} are tokenised", param="messages")
        return self.tokenizer.encode([text], add_special_tokens)[0]

    def _encode_text(self, tokens: Sequence[int]) -> bytes:
        return encode({"prompt": self.tokenizer.decode(tokens, skip_special_tokens=False)})

    async def _tokenize_prompts(
        self, given: str | list[str] | list[int] | list[list[int]]
    ) -> list[TokenizedPrompt]:
        if not given:
            raise ApiError(400, "prompt is empty", param="prompt")
        if isinstance(given, str):
            given = [given]
        if isinstance(given[0], int):
            return [TokenizedPrompt(tuple(given))]  # type: ignore[arg-type]
        if isinstance(given[0], str):
            texts: list[str] = given  # type: ignore[assignment]
            return await run_in_thread_if_large(
                self._encode_texts, sum(map(len, texts)), texts, True, "prompt"
            )
        return [TokenizedPrompt(tuple(tokens)) for tokens in given]  # type: ignore[arg-type]

    def _encode_texts(
        self, texts: Sequence[str], add_special_tokens: bool, param: str
    ) -> list[TokenizedPrompt]:
        for text in texts:
            least = self.tokenizer.min_num_tokens(text)
            if least > self.context_tokens:
                raise self.builder.context_error(f"at least {least}", param)
        encoded = self.tokenizer.encode(texts, add_special_tokens)
        return [TokenizedPrompt(tuple(ids), text) for ids, text in zip(encoded, texts, strict=True)]


def make_template_options(request: ChatRequest | TokenizeRequest) -> Json:
    """Raises ApiError if `chat_template_kwargs` has a reserved name."""
    options: Json = {}
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        # templates look for one or the other
        options = {
            "reasoning_effort": request.reasoning_effort,
            "enable_thinking": request.reasoning_effort != "none",
        }
    for name, value in (request.chat_template_kwargs or {}).items():
        if name in RESERVED_TEMPLATE_OPTIONS:
            message = f"chat_template_kwargs: {name} is not set there"
            raise ApiError(400, message, param="chat_template_kwargs")
        options[name] = value
    if request.continue_final_message:
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    elif request.add_generation_prompt is False:
        options["add_generation_prompt"] = False
    return options


def count_characters(request: ChatRequest | TokenizeRequest) -> int:
    """About how many characters there are to render, in any field."""
    return len(request.model_dump_json(exclude_none=True))


async def run_in_thread_if_large(
    work: Callable[..., Result], characters: int, *args: Any
) -> Result:
    """`work(*args)`, in another thread if `characters` are many."""
    if characters <= INLINE_CHARACTERS:
        return work(*args)
    return await asyncio.to_thread(work, *args)
