"""The roofline against measurements: `python -m benchmarks.roofline_check` prints the table.

Every row is shown, also those out of tolerance. `fitted` rows were used to set a parameter of the
device, the others were not.

H200: one card, medians of 5 to 10, 2026-11-29; Llama-3.1-8B shape, plain torch (cuBLAS, SDPA),
bfloat16; partitions by green contexts. CPU: SmolLM2-135M, weights packed as float16, on two cores
of an AMD Milan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from counterpoint.cost_model.roofline import MatrixProduct, Roofline
from counterpoint.spec.device import CPU_2, GB, H200, TERA, Curve
from counterpoint.spec.presets import PRESETS
from counterpoint.types import BatchShape


class CheckRow(NamedTuple):
    name: str
    unit: str
    predicted: float
    measured: float
    tolerance: float
    fitted: bool = False

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.measured - 1

    @property
    def ok(self) -> bool:
        return abs(self.error) <= self.tolerance


def prefill(tokens: int, layers: int, of_layers: int, samples: int = 0) -> BatchShape:
    shape = BatchShape.prefill(tokens, 0, of_layers, sampled=samples > 0)
    return shape.over_layers(0, layers)


def decode(batch: int, context: int, layers: int, of_layers: int) -> BatchShape:
    return BatchShape.decode(batch, batch * context, of_layers).over_layers(0, layers)


def h200_alone() -> Iterator[CheckRow]:
    llama = Roofline(PRESETS["llama-3.1-8b"], H200)
    skinny = {8: 772, 16: 1471, 24: 1958, 32: 2094, 48: 2616, 64: 3278, 132: 3595}
    for units, measured in skinny.items():
        cost = llama.product_cost(MatrixProduct(28672, 4096), 64, units)
        yield CheckRow(
            f"64-row product on {units} SMs",
            "GB/s",
            2 * 28672 * 4096 / cost.seconds / GB,
            measured,
            0.15,
            fitted=True,
        )
    for tokens, measured in {
        64: 114,
        128: 138,
        256: 328,
    }.items():  # launch-bound in eager torch, and unsteady
        cost = llama.solo_cost(prefill(tokens, 8, 32), 132)
        yield CheckRow(
            f"prefill {tokens} (host-bound)",
            "TFLOP/s",
            cost.flops / cost.seconds / TERA,
            measured,
            0.40,
            fitted=tokens == 64,
        )
    whole = {512: 13.4, 1024: 24.4, 2048: 48.6, 4096: 103, 8192: 219, 16384: 500}
    for tokens, measured in whole.items():
        yield CheckRow(
            f"prefill {tokens}, 32 layers",
            "ms",
            1e3 * llama.seconds(prefill(tokens, 32, 33), 132),
            measured,
            0.05,
        )
    by_units = {132: 25.2, 116: 28.9, 108: 30.0, 100: 30.9, 84: 34.3, 68: 40.0, 36: 74.0}
    for units, measured in by_units.items():
        predicted = 1e3 * llama.seconds(prefill(4096, 8, 32), units)
        yield CheckRow(
            f"prefill 4096, 8 layers on {units} SMs",
            "ms",
            predicted,
            measured,
            0.05,
            fitted=units in (132, 116, 84, 36),
        )
    yield CheckRow(
        "decode step, batch 1 (vLLM)",
        "ms",
        1e3 * llama.seconds(decode(1, 100, 32, 32), 132),
        4.97,
        0.15,
    )
    yield CheckRow(
        "decode step, batch 64, context 2100 (vLLM)",
        "ms",
        1e3 * llama.seconds(decode(64, 2100, 32, 32), 132),
        10.0,
        0.15,
    )
    mixed = BatchShape.prefill(1024, 1024, 32) + BatchShape.decode(64, 64 * 2100, 32)
    yield CheckRow(
        "chunk of 1024 with 64 decodes", "ms", 1e3 * llama.seconds(mixed, 132), 30.0, 0.15
    )


def h200_together() -> Iterator[CheckRow]:
    """Prefill of 4096 tokens beside decode batch 64, context 2048; 8 layers each. Decode attention
    was torch's SDPA, which reads at most 36 GB/s per SM; the preset has FlashInfer's."""
    sdpa = replace(
        H200.attention, read_bandwidth=Curve(((0, 0), (100, 3600 * GB), (132, 3600 * GB)))
    )
    llama = Roofline(PRESETS["llama-3.1-8b"], replace(H200, attention=sdpa))
    prompt, step = prefill(4096, 8, 32), decode(64, 2048, 8, 32)
    alone = {16: 9.8, 24: 7.0, 32: 5.4, 48: 3.8, 64: 3.0, 132: 2.18}
    for units, measured in alone.items():
        yield CheckRow(
            f"decode alone on {units} SMs",
            "ms",
            1e3 * llama.seconds(step, units),
            measured,
            0.15,
            fitted=True,
        )
    together = {
        16: (11.9, 31.5),
        24: (8.5, 34.0),
        32: (6.7, 37.2),
        48: (4.8, 43.1),
        64: (3.8, 52.3),
    }
    for units, (decode_ms, prefill_ms) in together.items():
        rest = 132 - units
        predicted = 1e3 * llama.seconds(step, units, (prompt, rest))
        yield CheckRow(
            f"decode on {units} SMs beside prefill", "ms", predicted, decode_ms, 0.10, fitted=True
        )
        predicted = 1e3 * llama.seconds(prompt, rest, (step, units))
        yield CheckRow(
            f"prefill on {rest} SMs beside decode", "ms", predicted, prefill_ms, 0.05, fitted=True
        )


def cpu() -> Iterator[CheckRow]:
    smollm = Roofline(PRESETS["smollm2-135m"], CPU_2, "float16", "float32")
    for units, tokens, rate in ((1, 512, 320), (2, 512, 510), (2, 2048, 424)):
        predicted = tokens / smollm.seconds(prefill(tokens, 30, 30), units)
        yield CheckRow(
            f"CPU prefill {tokens} on {units}", "tokens/s", predicted, rate, 0.15, fitted=True
        )
    for units, batch, rate in ((2, 1, 42.6), (2, 8, 172), (2, 32, 256), (1, 8, 113)):
        predicted = batch / smollm.seconds(decode(batch, 256, 30, 30), units)
        yield CheckRow(
            f"CPU decode batch {batch} on {units}",
            "tokens/s",
            predicted,
            rate,
            0.15,
            fitted=batch < 32,
        )
    prompt, step = prefill(512, 30, 30), decode(8, 256, 30, 30)
    predicted = smollm.seconds(prompt, 1, (step, 1)) / smollm.seconds(prompt, 1)
    yield CheckRow("CPU prefill beside decode", "x", predicted, 320 / 295, 0.10, fitted=True)
    predicted = smollm.seconds(step, 1, (prompt, 1)) / smollm.seconds(step, 1)
    yield CheckRow("CPU decode beside prefill", "x", predicted, 113 / 107.5, 0.10, fitted=True)


def rows() -> list[CheckRow]:
    return [*h200_alone(), *h200_together(), *cpu()]


def main() -> int:
    table = rows()
    print(f"{'':44} {'predicted':>10} {'measured':>10}          {'error':>7}  within")
    for row in table:
        mark = ("fitted" if row.fitted else "") if row.ok else "OUT"
        print(
            f"{row.name:44} {row.predicted:10.2f} {row.measured:10.2f} {row.unit:8} "
            f"{row.error:+7.1%}  {row.tolerance:.0%}  {mark}"
        )
    for kind, wanted in (("not fitted", False), ("fitted", True)):
        errors = sorted(abs(row.error) for row in table if row.fitted is wanted)
        print(
            f"{kind}: {len(errors)} rows, error p50 {errors[len(errors) // 2]:.1%}, "
            f"max {errors[-1]:.1%}"
        )
    return 0 if all(row.ok for row in table) else 1


if __name__ == "__main__":
    raise SystemExit(main())
