"""LLM: the engine as an object of a Python program.

    with counterpoint.LLM("smollm2", policy="chunked") as llm:
        for answer in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(answer.text)

Owns: the public types. Promises: the answers of the server for the same requests; all prompts go to
the engine together; answers come in the prompts' order; wrong settings and parameters raise before
anything runs. Must not: run the engine (engine.py does), or read the environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from counterpoint.config import Config, ConfigError, section_of
from counterpoint.serve.api.response_format import make_usage, pair_prompt_logprobs
from counterpoint.serve.offline.engine import FinishedRequest, OfflineEngine
from counterpoint.serve.output_parsing.output_parser import Call, merge_parts
from counterpoint.serve.text.output_processor import OutputPiece, OutputProcessor
from counterpoint.serve.text.preprocess import PreparedRequest
from counterpoint.serve.worker.streams import EngineLost
from counterpoint.types import TokenLogprobs

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Fields of the API, with its ranges and, where None, its defaults: `max_tokens` is 16 for
    texts, and what the context allows for chats."""

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def fields(self) -> dict[str, Any]:
        """Those that are set."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `finish_reason` is "stop" or "length"; `stop_reason` the stop string or token id
    that ended it, if one did. A stop token is the last of `token_ids`; `logprobs` are of the tokens
    before it. Of a chat, `text` is the content, without `reasoning` and `calls`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """The `n` `outputs` of one prompt; `text`, `token_ids` and `finish_reason` are the first's.
    `usage`: the API's. The first token of a prompt has no log-probability."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: dict[str, Any]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason


class LLM:
    """`settings` are those of the command line, with underscores: of model, device and scheduler,
    and `event_log`. Raises ConfigError or ModelError. Close it, or use it as a context manager."""

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        for name in settings:
            if section_of(name) in ("server", "cluster") and name != "event_log":
                raise ConfigError(
                    f"{name} is a setting of `counterpoint serve`:"
                    " here is one engine and no server; leave it out"
                )
        self._engine = OfflineEngine(Config().replace(model=model, **settings))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    ) -> list[RequestOutput]:
        """Continue each text, or list of token ids; one `params` for all, or one for each. Raises
        ApiError if a prompt or parameter is wrong, EngineLost if the engine fails."""
        if not isinstance(prompts, Sequence):
            raise TypeError(
                f"prompts is of type {type(prompts).__name__}:"
                " give a text, a list of token ids, or a list of these"
            )
        one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        every: Sequence[Any] = [prompts] if one else prompts
        each = [params] * len(every) if isinstance(params, SamplingParams) else params
        if not isinstance(each, Sequence) or not all(
            isinstance(one, SamplingParams) for one in each
        ):
            raise TypeError(
                f"params is of type {type(params).__name__}:"
                " give SamplingParams, or a list with one for each prompt"
            )
        if len(each) != len(every):
            raise ValueError(
                f"params has {len(each)} entries for {len(every)} prompts:"
                " give one, or one for each"
            )
        return self._outputs(
            [self._completion(prompt, p) for prompt, p in zip(every, each, strict=True)]
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams = SamplingParams(),
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several; `tools` and `tool_choice` as in the API,
        `template` goes to the model's chat template. Raises as `generate` does."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        every: Sequence[Any] = [messages] if one else messages
        fields = {
            "tools": tools,
            "tool_choice": tool_choice,
            "chat_template_kwargs": template,
        } | params.fields()
        if params.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": params.logprobs}
        return self._outputs([self._chat(conversation, fields) for conversation in every])

    def _completion(self, prompt: Prompt, params: SamplingParams) -> PreparedRequest:
        return self._engine.completion({"prompt": prompt} | params.fields())

    def _chat(self, messages: Conversation, fields: dict[str, Any]) -> PreparedRequest:
        return self._engine.conversation({"messages": messages} | fields)

    def _outputs(self, asks: list[PreparedRequest]) -> list[RequestOutput]:
        done = {
            finished.prepared.id: make_request_output(finished)
            for finished in self._engine.answer_all(asks)
        }
        return [done[ask.id] for ask in asks]


def make_request_output(finished: FinishedRequest) -> RequestOutput:
    """Raises EngineLost if a choice of it failed."""
    if finished.error:
        raise EngineLost(finished.error)
    request, prompt = finished.prepared.api_request, finished.prepared.prompts[0].tokens
    choices = tuple(
        make_completion_output(*each, finished.prepared)
        for each in zip(finished.processors, finished.pieces, strict=True)
    )
    known = None
    if request.prompt_logprobs is not None:
        known = tuple(each for _, each in pair_prompt_logprobs(prompt, finished.processors[0]))
    return RequestOutput(prompt, choices, make_usage(finished.prepared, finished.processors), known)


def make_completion_output(
    answer: OutputProcessor, pieces: Sequence[OutputPiece], ask: PreparedRequest
) -> CompletionOutput:
    known = (
        tuple(entry.logprobs for piece in pieces for entry in piece.logprob_entries)
        if ask.output_options.logprobs
        else None
    )
    tokens = () if ask.output_options.discard_tokens else tuple(answer.token_ids)
    speech, last = merge_parts(part for piece in pieces for part in piece.parts), pieces[-1]
    return CompletionOutput(
        speech.content,
        tokens,
        str(last.finish_reason),
        last.stop_reason,
        known,
        speech.reasoning,
        speech.calls,
    )
