"""Intake: from an API request to what the engine is asked.

Owns: tokenising, every check that needs the model (vocabulary, context, KV pool), defaults, seeds and ids. Promises: what leaves
here the engine will not refuse; long texts are tokenised off the event loop, hopeless ones not at all; ids are unique whatever
clients send.
Must not: talk to the engine, or shape an answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from counterpoint.config import SchedulerConfig
from counterpoint.serve.api.openai import (
    MAX_PROMPTS,
    MAX_TEXT_CHARACTERS,
    ApiError,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    SloFields,
    TokenizeRequest,
)
from counterpoint.serve.output_parsing.chat_formats import (
    ChatFormat,
    find_answer_prefix,
    find_chat_format,
)
from counterpoint.serve.output_parsing.streaming_parser import ParserConfig, make_parser_config
from counterpoint.serve.output_parsing.tools import (
    make_template_messages,
    find_allowed_tools,
    make_answer_grammar,
    must_call,
    validate_tools,
)
from counterpoint.serve.structured_output.checker import (
    GrammarChecker,
    WantedStructure,
    find_structure,
)
from counterpoint.serve.structured_output.grammar import ANSWER_RULE
from counterpoint.serve.text.output_processor import OutputOptions
from counterpoint.serve.text.tokenizer import ModelTokenizer, TokenizerError
from counterpoint.serve.worker.wire import EngineInfo
from counterpoint.types import AddRequest, Sampling, Slo

DEFAULT_COMPLETION_TOKENS = 16  # the default of /v1/completions, OpenAI's own
INLINE_CHARACTERS = 4096  # texts up to this are tokenised where they are
# what the template's renderer is given by us
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
MAX_PROMPT_LOGPROBS = 2**20  # log-probabilities in one answer
SEED_MASK = 2**63 - 1
SEED_STEP = (
    0x9E3779B97F4A7C15  # odd, so that the seeds of n choices differ (the golden ratio's 64 bits)
)

Result = TypeVar("Result")
encode = msgspec.json.encode


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """`text` is what the client gave, None if it gave token ids."""

    tokens: tuple[int, ...]
    text: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One API request, ready for the engine. Choice i is `arrives[i]` and answers `prompts[i // n]`."""

    id: str
    model: str
    created_s: int
    prompts: tuple[TokenizedPrompt, ...]
    n: int
    engine_requests: tuple[AddRequest, ...]
    output_options: OutputOptions
    api_request: GenerationRequest

    def prompt_of(self, choice: int) -> TokenizedPrompt:
        return self.prompts[choice // self.n]


class Preprocessor:
    """`name` is the model's name in the API; `scheduler` has the targets of requests."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        engine_info: EngineInfo,
        name: str,
        checker: GrammarChecker,
        scheduler: SchedulerConfig = SchedulerConfig(),
    ) -> None:
        self.tokenizer = tokenizer
        self.checker = checker
        self.model_name = name
        self.vocab_size = engine_info.vocab
        self.context_tokens = min(engine_info.max_context_tokens, engine_info.kv_tokens)
        self.scheduler = scheduler

    @functools.cached_property
    def chat_format(self) -> ChatFormat:
        """How the model spells reasoning and calls. Takes seconds, the first time: not on the event loop."""
        return find_chat_format(self.tokenizer)

    async def _load_chat_format(self) -> None:
        if "dialect" not in vars(self):
            await asyncio.to_thread(lambda: self.chat_format)

    # ------------------------------------------------------------ the endpoints

    async def prepare_chat(
        self, request: ChatRequest, prefix: str = "chatcmpl-", max_tokens: int | None = None
    ) -> PreparedRequest:
        """`prefix`: of the id. `at_most`: the most tokens of the answer, which what is left of the context may cut to fewer."""
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
        limit = request.max_completion_tokens or request.max_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        ask = self._prepare(
            prefix,
            request,
            [prompt],
            limit,
            max_tokens or self.context_tokens,
            logprobs,
            "messages",
        )
        hearing = self._make_parser_config(request, tools, prompt.text or "")
        ask = await self._with_grammar(
            ask, self._find_structure(request, hearing, prompt.text or "")
        )
        if hearing is None:
            return ask
        options = dataclasses.replace(
            ask.output_options,
            make_parser=hearing,
            parser_token_ids=hearing.chat_format.marker_token_ids(hearing.fields),
        )
        return dataclasses.replace(ask, output_options=options)

    def _make_parser_config(
        self, request: ChatRequest, tools: list[dict[str, Any]], prompt: str
    ) -> ParserConfig | None:
        """What tells reasoning and calls from content."""
        dialect = (
            self.chat_format.with_known_call_format() if must_call(request) else self.chat_format
        )
        continued = (
            str(request.messages[-1].to_template_message()["content"] or "")
            if request.continue_final_message
            else None
        )
        begun = find_answer_prefix(dialect, prompt, continued)
        return make_parser_config(
            dialect,
            find_allowed_tools(request, tools, dialect),
            request.separate_reasoning is not False,
            begun,
        )

    def _find_structure(
        self, request: ChatRequest, hearing: ParserConfig | None, prompt: str
    ) -> WantedStructure | None:
        """What the answer must look like, behind what the model may think. Raises ApiError if that is said in two ways."""
        wanted = find_structure(request)
        if must_call(request):
            if (
                wanted is not None and wanted.param != "response_format"
            ):  # that one is for answers that do not call
                raise ApiError(
                    400,
                    f"{wanted.param} beside a tool_choice that forces a call: give one",
                    param=wanted.param,
                )
            assert hearing is not None
            return WantedStructure(
                "lark", make_answer_grammar(hearing, self.tokenizer, prompt), "tools"
            )
        if wanted is None or hearing is None:
            return wanted
        after = make_answer_grammar(hearing, self.tokenizer, prompt, alternative=ANSWER_RULE)
        return replace(wanted, outer_grammar=after) if after != f"start: {ANSWER_RULE}" else wanted

    async def prepare_completion(self, request: CompletionRequest) -> PreparedRequest:
        self.check_model(request.model)
        prompts = await self._tokenize_prompts(request.prompt)
        ask = self._prepare(
            "cmpl-",
            request,
            prompts,
            request.max_tokens,
            DEFAULT_COMPLETION_TOKENS,
            request.logprobs,
            "prompt",
        )
        if request.echo and request.logprobs is not None:
            self._check_prompt_logprobs(prompts, ask.n, request.logprobs, "logprobs")
            arrives = [
                replace(a, sampling=replace(a.sampling, prompt_logprobs=request.logprobs))
                for a in ask.engine_requests
            ]
            ask = dataclasses.replace(ask, engine_requests=tuple(arrives))
        return await self._with_grammar(ask, find_structure(request))

    async def _with_grammar(
        self, ask: PreparedRequest, structure: WantedStructure | None
    ) -> PreparedRequest:
        """The same, its answers bound to what is wanted. Raises ApiError if that can't be."""
        if structure is None:
            return ask
        grammar = await self.checker.check(structure)
        arrives = tuple(
            replace(a, sampling=replace(a.sampling, grammar=grammar)) for a in ask.engine_requests
        )
        return dataclasses.replace(ask, engine_requests=arrives)

    async def tokenize(self, request: TokenizeRequest) -> bytes:
        """The answer of /tokenize, as JSON. Raises ApiError."""
        self.check_model(request.model)
        await self._load_chat_format()
        return await run_in_thread_if_large(self._tokenize, count_characters(request), request)

    async def count_prompt(self, request: TokenizeRequest) -> list[int]:
        """Raises ApiError."""
        self.check_model(request.model)
        await self._load_chat_format()
        return await run_in_thread_if_large(self._token_ids, count_characters(request), request)

    async def detokenize(self, request: DetokenizeRequest) -> bytes:
        """The answer of /detokenize, as JSON. Raises ApiError."""
        self.check_model(request.model)
        self._check_token_ids(request.tokens, "tokens")
        return await run_in_thread_if_large(self._detokenize, len(request.tokens), request.tokens)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist: this is {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    # ------------------------------------------------------------ prompts

    def _encode_chat(
        self, messages: Sequence[ChatMessage], tools: list[dict[str, Any]], options: dict[str, Any]
    ) -> TokenizedPrompt:
        """Raises ApiError if the template can't, or if it is hopelessly long."""
        return self._encode_texts(
            [self._render_chat(messages, tools, options)], special=False, param="messages"
        )[0]

    def _render_chat(
        self, messages: Sequence[ChatMessage], tools: list[dict[str, Any]], options: dict[str, Any]
    ) -> str:
        turns, tool_options = make_template_messages(messages, tools, self.chat_format)
        try:
            return self.tokenizer.apply_chat_template(turns, **options, **tool_options)
        except TokenizerError as error:
            raise ApiError(400, str(error), param="messages") from None

    def _tokenize(self, request: TokenizeRequest) -> bytes:
        tokens = self._token_ids(request)
        names = (
            [self.tokenizer.token_string(token) for token in tokens]
            if request.return_token_strs
            else None
        )
        return encode(
            {
                "count": len(tokens),
                "max_model_len": self.context_tokens,
                "tokens": tokens,
                "token_strs": names,
            }
        )

    def _token_ids(self, request: TokenizeRequest) -> list[int]:
        if request.messages is None:
            text, special = request.prompt or "", request.add_special_tokens is not False
        else:
            text, special = (
                self._render_chat(
                    request.messages, validate_tools(request), make_template_options(request)
                ),
                bool(request.add_special_tokens),
            )
        if len(text) > MAX_TEXT_CHARACTERS:
            message = f"the conversation has {len(text)} characters: at most {MAX_TEXT_CHARACTERS} are tokenised"
            raise ApiError(400, message, param="messages")
        return self.tokenizer.encode([text], special)[0]

    def _detokenize(self, tokens: Sequence[int]) -> bytes:
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
        self, texts: Sequence[str], special: bool, param: str
    ) -> list[TokenizedPrompt]:
        for text in texts:
            least = self.tokenizer.min_num_tokens(text)
            if least > self.context_tokens:
                raise self._context_error(f"at least {least}", param)
        return [
            TokenizedPrompt(tuple(ids), text)
            for ids, text in zip(self.tokenizer.encode(texts, special), texts, strict=True)
        ]

    def _context_error(self, tokens: object, param: str) -> ApiError:
        message = (
            f"this model's context is {self.context_tokens} tokens, and the prompt has {tokens}"
        )
        return ApiError(400, message, param=param, code="context_length_exceeded")

    # ------------------------------------------------------------ what is asked

    def _prepare(
        self,
        prefix: str,
        request: GenerationRequest,
        prompts: list[TokenizedPrompt],
        limit: int | None,
        default_limit: int,
        logprobs: int | None,
        param: str,
    ) -> PreparedRequest:
        n = request.n or 1
        if len(prompts) * n > MAX_PROMPTS:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with n = {n} make more than {MAX_PROMPTS} choices",
                param="n",
            )
        if request.prompt_logprobs is not None:
            self._check_prompt_logprobs(prompts, n, request.prompt_logprobs, "prompt_logprobs")
        id = f"{prefix}{uuid.uuid4().hex}"
        seed = (secrets.randbits(63) if request.seed is None else request.seed) & SEED_MASK
        arrives: list[AddRequest] = []
        for prompt in prompts:
            most = self._max_output_tokens(prompt, limit, default_limit, param)
            sampling = self._make_sampling(request, max(1, most), logprobs)
            for choice in range(n):
                arrives.append(
                    AddRequest(
                        id=f"{id}-{len(arrives)}",
                        prompt=prompt.tokens,
                        sampling=replace(sampling, seed=(seed + choice * SEED_STEP) & SEED_MASK),
                        slo=self._resolve_slo(request.slo or SloFields(), len(prompt.tokens)),
                        priority=request.priority or 0,
                        salt=request.cache_salt or "",
                    )
                )
        options = OutputOptions(
            stop_strings=request.stop_strings,
            include_stop_string=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            min_tokens=request.min_tokens or 0,
            logprobs=logprobs is not None,
            discard_tokens=limit == 0,
        )
        return PreparedRequest(
            id,
            self.model_name,
            int(time.time()),
            tuple(prompts),
            n,
            tuple(arrives),
            options,
            request,
        )

    def _check_prompt_logprobs(
        self, prompts: Sequence[TokenizedPrompt], n: int, alternatives: int, param: str
    ) -> None:
        """What is known of a prompt's tokens is told for each choice, and held until the answer is whole."""
        told = sum(len(prompt.tokens) for prompt in prompts) * n * (alternatives + 1)
        if told > MAX_PROMPT_LOGPROBS:
            raise ApiError(
                400,
                f"{param}: {told} log-probabilities of prompts would be told, at most {MAX_PROMPT_LOGPROBS} are: ask for fewer "
                "alternatives, choices or prompts at once",
                param=param,
            )

    def _max_output_tokens(
        self, prompt: TokenizedPrompt, limit: int | None, default: int, param: str
    ) -> int:
        """How many tokens the answer may have. Raises ApiError if prompt and answer do not fit."""
        size, context = len(prompt.tokens), self.context_tokens
        if not size:
            raise ApiError(400, "the prompt has no tokens", param=param)
        if size >= context:
            raise self._context_error(size, param)
        if max(prompt.tokens) >= self.vocab_size:
            raise ApiError(
                400,
                f"token id {max(prompt.tokens)} is not in the vocabulary of {self.vocab_size}",
                param=param,
            )
        if limit is None:
            return min(default, context - size)
        if size + limit > context:
            message = (
                f"this model's context is {context} tokens, and {size + limit} are asked for: "
                f"{size} in the prompt and {limit} for the answer"
            )
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        return limit

    def _resolve_slo(self, given: SloFields, prompt_tokens: int) -> Slo:
        """What a request says of its targets beats what the server was told."""
        return Slo(given.ttft_s, given.tpot_s, given.itl_s).with_defaults(
            self.scheduler.slo(prompt_tokens)
        )

    def _make_sampling(
        self, request: GenerationRequest, max_tokens: int, logprobs: int | None
    ) -> Sampling:
        def given(value: Any, default: Any) -> Any:
            return default if value is None else value

        min_tokens = given(request.min_tokens, 0)
        if min_tokens > max_tokens:
            raise ApiError(
                400,
                f"min_tokens ({min_tokens}) is more than the {max_tokens} tokens allowed",
                param="min_tokens",
            )
        top_p, top_k = given(request.top_p, 1.0), max(0, given(request.top_k, 0))
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=given(request.temperature, 1.0),
            top_k=1
            if top_p == 0
            else 0
            if top_k >= self.vocab_size
            else top_k,  # an empty nucleus still holds the likeliest token
            top_p=top_p if top_p > 0 else 1.0,
            min_p=given(request.min_p, 0.0),
            presence_penalty=given(request.presence_penalty, 0.0),
            frequency_penalty=given(request.frequency_penalty, 0.0),
            repetition_penalty=given(request.repetition_penalty, 1.0),
            logit_bias=self._make_logit_bias(request.logit_bias or {}),
            stop_token_ids=self._check_token_ids(request.stop_token_ids or (), "stop_token_ids"),
            ignore_eos=bool(request.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )

    def _make_logit_bias(self, biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
        for key in biases:
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise ApiError(
                    400, f"logit_bias: {key[:50]!r} is not a token id", param="logit_bias"
                )
        self._check_token_ids([int(key) for key in biases], "logit_bias")
        return tuple({int(key): bias for key, bias in biases.items()}.items())

    def _check_token_ids(self, tokens: Sequence[int], param: str) -> tuple[int, ...]:
        for token in tokens:
            if token >= self.vocab_size:
                raise ApiError(
                    400,
                    f"{param}: token id {token} is not in the vocabulary of {self.vocab_size}",
                    param=param,
                )
        return tuple(tokens)


def make_template_options(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if (
        isinstance(request, ChatRequest) and request.reasoning_effort is not None
    ):  # templates look for one or the other
        options = {
            "reasoning_effort": request.reasoning_effort,
            "enable_thinking": request.reasoning_effort != "none",
        }
    for name, value in (request.chat_template_kwargs or {}).items():
        if name in RESERVED_TEMPLATE_OPTIONS:
            raise ApiError(
                400, f"chat_template_kwargs: {name} is not set there", param="chat_template_kwargs"
            )
        options[name] = value
    if request.continue_final_message:
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    elif request.add_generation_prompt is False:
        options["add_generation_prompt"] = False
    return options


def count_characters(request: ChatRequest | TokenizeRequest) -> int:
    """About how many characters there are to render, wherever they stand."""
    return len(request.model_dump_json(exclude_none=True))


async def run_in_thread_if_large(
    work: Callable[..., Result], characters: int, *args: Any
) -> Result:
    """`work(*args)`, in another thread if there is much of it."""
    if characters <= INLINE_CHARACTERS:
        return work(*args)
    return await asyncio.to_thread(work, *args)
