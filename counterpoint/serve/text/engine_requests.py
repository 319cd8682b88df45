"""From an API request and its tokenised prompts to engine requests.

Owns: sampling parameters, defaults, seeds, ids, and the checks against vocabulary and context.
Promises: the engine accepts what is built here; ids are unique whatever clients send.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
import uuid
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from counterpoint.config import SchedulerConfig
from counterpoint.serve.api.errors import ApiError
from counterpoint.serve.api.openai import MAX_PROMPTS, GenerationRequest, SloFields
from counterpoint.serve.text.output_processor import OutputOptions
from counterpoint.types import AddRequest, Sampling, Slo

MAX_PROMPT_LOGPROBS = 2**20  # in one response
SEED_MASK = 2**63 - 1
SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio; odd, so the seeds of n choices differ


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """`text` is what the client sent, None if it sent token ids."""

    tokens: tuple[int, ...]
    text: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One API request for the engine. Choice i is `engine_requests[i]`, of `prompts[i // n]`."""

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

    def with_sampling(self, **changes: Any) -> PreparedRequest:
        """The same with these sampling fields in every engine request."""
        requests = tuple(
            replace(request, sampling=replace(request.sampling, **changes))
            for request in self.engine_requests
        )
        return dataclasses.replace(self, engine_requests=requests)


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointSettings:
    """What differs between endpoints. `param` names the prompt's field in errors.

    `max_tokens` is the client's limit; without one, `default_max_tokens` holds, cut to the context.
    """

    id_prefix: str
    param: str
    max_tokens: int | None
    default_max_tokens: int
    logprobs: int | None


class EngineRequestBuilder:
    """For the model `model_name`; `scheduler` has the default latency targets."""

    def __init__(
        self, model_name: str, vocab_size: int, context_tokens: int, scheduler: SchedulerConfig
    ) -> None:
        self.model_name = model_name
        self.vocab_size = vocab_size
        self.context_tokens = context_tokens
        self.scheduler = scheduler

    def build(
        self,
        request: GenerationRequest,
        prompts: Sequence[TokenizedPrompt],
        settings: EndpointSettings,
    ) -> PreparedRequest:
        """Raises ApiError."""
        n = request.n or 1
        if len(prompts) * n > MAX_PROMPTS:
            message = f"{len(prompts)} prompts with n = {n} make more than {MAX_PROMPTS} choices"
            raise ApiError(400, message, param="n")
        if request.prompt_logprobs is not None:
            check_prompt_logprobs(prompts, n, request.prompt_logprobs, "prompt_logprobs")
        id = f"{settings.id_prefix}{uuid.uuid4().hex}"
        seed = secrets.randbits(63) if request.seed is None else request.seed
        engine_requests: list[AddRequest] = []
        for prompt in prompts:
            max_tokens = max(1, self._max_output_tokens(prompt, settings))
            sampling = self._make_sampling(request, max_tokens, settings.logprobs)
            slo = self._resolve_slo(request.slo or SloFields(), len(prompt.tokens))
            for choice in range(n):
                engine_requests.append(
                    AddRequest(
                        id=f"{id}-{len(engine_requests)}",
                        prompt=prompt.tokens,
                        sampling=replace(sampling, seed=(seed + choice * SEED_STEP) & SEED_MASK),
                        slo=slo,
                        priority=request.priority or 0,
                        salt=request.cache_salt or "",
                    )
                )
        return PreparedRequest(
            id=id,
            model=self.model_name,
            created_s=int(time.time()),
            prompts=tuple(prompts),
            n=n,
            engine_requests=tuple(engine_requests),
            output_options=make_output_options(request, settings),
            api_request=request,
        )

    def context_error(self, tokens: object, param: str) -> ApiError:
        message = (
            f"this model's context is {self.context_tokens} tokens, and the prompt has {tokens}"
        )
        return ApiError(400, message, param=param, code="context_length_exceeded")

    def check_token_ids(self, tokens: Sequence[int], param: str) -> tuple[int, ...]:
        """Raises ApiError if one is not in the vocabulary."""
        for token in tokens:
            if token >= self.vocab_size:
                message = f"token id {token} is not in the vocabulary of {self.vocab_size}"
                raise ApiError(400, f"{param}: {message}", param=param)
        return tuple(tokens)

    def _max_output_tokens(self, prompt: TokenizedPrompt, settings: EndpointSettings) -> int:
        """Raises ApiError if prompt and answer do not fit into the context."""
        size, context = len(prompt.tokens), self.context_tokens
        limit, param = settings.max_tokens, settings.param
        if not size:
            raise ApiError(400, "the prompt has no tokens", param=param)
        if size >= context:
            raise self.context_error(size, param)
        if max(prompt.tokens) >= self.vocab_size:
            message = f"token id {max(prompt.tokens)} is not in the vocabulary of {self.vocab_size}"
            raise ApiError(400, message, param=param)
        if limit is None:
            return min(settings.default_max_tokens, context - size)
        if size + limit > context:
            message = (
                f"this model's context is {context} tokens, and {size + limit} are asked for: "
                f"{size} in the prompt and {limit} for the answer"
            )
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        return limit

    def _resolve_slo(self, given: SloFields, prompt_tokens: int) -> Slo:
        """The request's own targets, then the server's."""
        defaults = self.scheduler.slo(prompt_tokens)
        return Slo(given.ttft_s, given.tpot_s, given.itl_s).with_defaults(defaults)

    def _make_sampling(
        self, request: GenerationRequest, max_tokens: int, logprobs: int | None
    ) -> Sampling:
        min_tokens = or_default(request.min_tokens, 0)
        if min_tokens > max_tokens:
            message = f"min_tokens ({min_tokens}) is more than the {max_tokens} tokens allowed"
            raise ApiError(400, message, param="min_tokens")
        top_p, top_k = or_default(request.top_p, 1.0), max(0, or_default(request.top_k, 0))
        if top_p == 0:  # an empty nucleus still holds the likeliest token
            top_p, top_k = 1.0, 1
        elif top_k >= self.vocab_size:
            top_k = 0
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=or_default(request.temperature, 1.0),
            top_k=top_k,
            top_p=top_p,
            min_p=or_default(request.min_p, 0.0),
            presence_penalty=or_default(request.presence_penalty, 0.0),
            frequency_penalty=or_default(request.frequency_penalty, 0.0),
            repetition_penalty=or_default(request.repetition_penalty, 1.0),
            logit_bias=self._make_logit_bias(request.logit_bias or {}),
            stop_token_ids=self.check_token_ids(request.stop_token_ids or (), "stop_token_ids"),
            ignore_eos=bool(request.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )

    def _make_logit_bias(self, biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
        for key in biases:
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                message = f"logit_bias: {key[:50]!r} is not a token id"
                raise ApiError(400, message, param="logit_bias")
        self.check_token_ids([int(key) for key in biases], "logit_bias")
        return tuple({int(key): bias for key, bias in biases.items()}.items())


def or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def make_output_options(request: GenerationRequest, settings: EndpointSettings) -> OutputOptions:
    return OutputOptions(
        stop_strings=request.stop_strings,
        include_stop_string=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
        logprobs=settings.logprobs is not None,
        discard_tokens=settings.max_tokens == 0,
    )


def check_prompt_logprobs(
    prompts: Sequence[TokenizedPrompt], n: int, alternatives: int, param: str
) -> None:
    """Raises ApiError if there are too many: they are held until the response is complete."""
    count = sum(len(prompt.tokens) for prompt in prompts) * n * (alternatives + 1)
    if count > MAX_PROMPT_LOGPROBS:
        raise ApiError(
            400,
            f"{param}: {count} log-probabilities of prompts would be sent, at most "
            f"{MAX_PROMPT_LOGPROBS} are: ask for fewer alternatives, choices or prompts at once",
            param=param,
        )
