"""A picture of the lanes over time: one row per policy, on one time axis.

`draw_lanes` returns None if matplotlib is not installed. Must not: compute a figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from counterpoint.device.timeline import Timeline

COLOURS = {"prefill": "#d1495b", "decode": "#2e86ab", "mixed": "#8e6c8a"}


def draw_lanes(timelines: Mapping[str, Timeline], path: Path) -> Path | None:
    """Draws each policy's steps as bars: width is duration, height the share of the device."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(
        len(timelines), 1, figsize=(13, 1.5 * len(timelines) + 1), sharex=True, squeeze=False
    )
    for axis, (policy, timeline) in zip(axes[:, 0], timelines.items(), strict=True):
        spans = timeline.spans
        start_s = min((s.started_s for s in spans), default=0.0)
        most = max((s.units for s in spans), default=1)
        for span in spans:
            # Prefill starts at the bottom and decode at the top, as the lanes take their cores.
            height = span.units / most
            bottom = 1 - height if span.kind == "decode" else 0
            axis.bar(
                span.started_s - start_s,
                height,
                width=max(span.ended_s - span.started_s, 0.004),
                bottom=bottom,
                align="edge",
                color=COLOURS[span.kind],
                linewidth=0,
            )
        axis.set_ylim(0, 1)
        axis.set_yticks([])
        axis.set_ylabel(policy, rotation=0, ha="right", va="center")
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel("seconds")
    axes[0, 0].set_title(
        "Cores per lane over time: height is the share of the device; white is idle",
        loc="left",
        fontsize=11,
    )
    figure.legend(
        handles=[Patch(color=c, label=k) for k, c in COLOURS.items()],
        loc="upper right",
        ncols=3,
        frameon=False,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
