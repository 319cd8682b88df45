"""What a device and a configuration allow: the numbers that an engine is bound by."""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.types import AddRequest, Sampling


@dataclass(frozen=True, slots=True)
class DeviceShape:
    """What a policy schedules on: a device of `units` units and a model of `layers` layers.

    `depth`: steps that a lane may have in flight. `levels`: decode units of the splits that the
    device allows. `chunk_tokens`: the device's usual budget for a chunked step.
    """

    units: int
    layers: int
    depth: int = 1
    levels: tuple[int, ...] = ()
    chunk_tokens: int = 512


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`overlap`: steps of two lanes may share units (not on a CPU)."""

    pages: int
    page_tokens: int
    max_running: int
    max_context_tokens: int
    max_pass_tokens: int
    eos_token_ids: tuple[int, ...]
    units: int
    layers: int
    overlap: bool = False
    max_preemptions: int = 3
    max_bypass_s: float = 5.0
    prefix_cache: bool = True

    def stop_token_ids(self, sampling: Sampling) -> frozenset[int]:
        """Tokens that end an output.

        A grammar allows the end-of-sequence token only where the output must end, so then it
        always counts.
        """
        uses_eos = sampling.grammar or not sampling.ignore_eos
        return frozenset((*sampling.stop_token_ids, *(self.eos_token_ids if uses_eos else ())))

    def rejection_reason(self, request: AddRequest) -> str:
        """Why this engine can never serve `request`; empty if it can."""
        prompt, max_tokens = len(request.prompt), request.sampling.max_tokens
        generated = len(request.generated_prefix)
        if not prompt:
            return "the prompt is empty"
        if max_tokens < 1:
            return f"max_tokens is {max_tokens}: it must be at least 1"
        if generated >= max_tokens:
            there = f"{generated} tokens of the answer are there already"
            return f"{there}, and max_tokens is {max_tokens}"
        need = f"prompt ({prompt} tokens) and max_tokens ({max_tokens}) exceed"
        if prompt + max_tokens > self.max_context_tokens:
            return f"{need} the context of {self.max_context_tokens} tokens"
        if prompt + max_tokens - 1 > self.pages * self.page_tokens:
            return f"{need} the KV cache of {self.pages * self.page_tokens} tokens"
        return ""
