"""What a device and a configuration allow.

Owns: the numbers an engine is bound by, and which requests can never be served within them. Must not: change.
"""

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
    """What the device and the configuration allow. `overlap`: steps of two lanes may share units (not on a CPU)."""

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
        """Tokens that end an answer. A grammar's end is sampled only where nothing else may be, so it is always heeded."""
        heeds_eos = sampling.grammar or not sampling.ignore_eos
        return frozenset((*sampling.stop_token_ids, *(self.eos_token_ids if heeds_eos else ())))

    def rejection_reason(self, request: AddRequest) -> str:
        """Why `arrive` can never be served here; empty if it can."""
        prompt, answer = len(request.prompt), request.sampling.max_tokens
        if not prompt:
            return "the prompt is empty"
        if answer < 1:
            return f"max_tokens is {answer}: it must be at least 1"
        if len(request.generated_prefix) >= answer:
            return f"{len(request.generated_prefix)} tokens of the answer are there already, and max_tokens is {answer}"
        asked = f"prompt ({prompt} tokens) and max_tokens ({answer}) exceed"
        if prompt + answer > self.max_context_tokens:
            return f"{asked} the context of {self.max_context_tokens} tokens"
        if prompt + answer - 1 > self.pages * self.page_tokens:
            return f"{asked} the KV cache of {self.pages * self.page_tokens} tokens"
        return ""
