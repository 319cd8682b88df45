"""How fast the decoder alone is on this CPU.

    python -m benchmarks.cpu_decoder [--model MODEL] [--threads N]

Times one forward pass as the executor runs it (embedding, all layers, final norm, LM head, greedy
choice) after a warm-up, and prints the median of the repeats.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer

from counterpoint.config import ModelConfig
from counterpoint.model.batch import PassSegments, make_batch
from counterpoint.model.decoder import Decoder
from counterpoint.model.kv import KVPool
from counterpoint.model.ops_cpu import CpuOptions
from counterpoint.model.weights import load_decoder
from counterpoint.spec.source import DEFAULT_CACHE, resolve_model

PAGE_TOKENS = 16


def make_pass(
    decoder: Decoder, requests: int, start: int, tokens: int
) -> Callable[[], torch.Tensor]:
    """A pass in which each of `requests` computes `tokens` tokens after `start` cached ones."""
    generator = torch.Generator().manual_seed(0)
    pages = -(-(start + tokens) // PAGE_TOKENS)
    kv = KVPool(decoder.spec, requests * pages, PAGE_TOKENS, decoder.kv_dtype)
    for pool in (*kv.k, *kv.v):
        pool.normal_(generator=generator)
    tokens_T = torch.randint(decoder.spec.vocab, (requests * tokens,), generator=generator)
    start_S, tokens_S = torch.full((requests,), start), torch.full((requests,), tokens)
    sample_S = torch.ones(requests, dtype=torch.bool)
    table_SP = torch.randperm(requests * pages, generator=generator).view(requests, pages)
    segments = PassSegments(start_S, tokens_S, sample_S, table_SP)

    def run() -> torch.Tensor:
        batch = make_batch(tokens_T, segments, PAGE_TOKENS, decoder.ops)
        x_TD = decoder.run_layers(decoder.embed(batch), batch, kv, 0, decoder.spec.layers)
        return decoder.logits(x_TD, batch).argmax(-1)

    return run


def median_s(run: Callable[[], torch.Tensor], repeats: int) -> float:
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    timer.timeit(2)
    return sorted(timer.timeit(1).median for _ in range(repeats))[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_decoder", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", default="smollm2", help="a folder, a GGUF file or a name")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument(
        "--cache", default=str(DEFAULT_CACHE), help="folder of fetched models and compiled kernels"
    )
    parser.add_argument(
        "--no-kernels", action="store_true", help="plain torch, without the C kernels"
    )
    parser.add_argument(
        "--context", type=int, default=256, help="context of a decode step, in tokens"
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = ModelConfig(model=options.model, dtype=options.dtype, load_format=options.load_format)
    decoder = load_decoder(
        resolve_model(options.model, options.cache),
        config,
        cpu=CpuOptions(cache=None if options.no_kernels else options.cache),
    )
    print(
        f"{decoder.spec.name}, {decoder.ops.name}, {options.threads} threads, "
        f"median of {options.repeats}\n"
    )
    print("| pass | ms | tokens/s |\n|---|---|---|")
    with torch.inference_mode():
        seconds = median_s(make_pass(decoder, 1, 0, options.prompt), options.repeats)
        print(
            f"| prefill {options.prompt} | {seconds * 1e3:.1f} | {options.prompt / seconds:.0f} |"
        )
        for requests in (1, 8, 32):
            seconds = median_s(
                make_pass(decoder, requests, options.context - 1, 1), options.repeats
            )
            print(
                f"| decode batch {requests}, context {options.context} "
                f"| {seconds * 1e3:.1f} | {requests / seconds:.0f} |"
            )


if __name__ == "__main__":
    main()
