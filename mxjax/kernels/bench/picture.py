"""Results as a bar chart: share of the floor, a group of bars for each case."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from mxjax.kernels.bench.measure import Result

COLORS = {
    "xla": (150, 150, 150),
    "mosaic": (32, 92, 182),
    "triton": (8, 122, 118),
    "cudnn": (196, 62, 62),
    "torch.compile": (238, 128, 60),
    "Liger": (122, 170, 60),
}
_OTHER = (120, 90, 160)
_DARK, _PALE, _WHITE = (34, 34, 34), (225, 225, 225), (255, 255, 255)
_BAR, _GAP, _LEFT, _WIDTH, _RIGHT, _TOP = 15, 14, 300, 520, 170, 34


def save_png(results: Sequence[Result], title: str, path: Path) -> None:
    """Write the chart of the results that have a share of the floor.

    Raises:
      ImportError: Pillow is not installed.
      ValueError: no result has one.
    """
    from PIL import Image, ImageDraw, ImageFont

    rows = [r for r in results if r.share_of_floor is not None]
    if not rows:
        raise ValueError("no picture: the ceilings of this device are not known")
    groups = [list(g) for _, g in groupby(rows, lambda r: (r.case, r.work))]
    height = _TOP + sum(len(g) * _BAR + _GAP for g in groups) + 30
    size = (_LEFT + _WIDTH + _RIGHT, height)
    zoom = 2
    image = Image.new("RGB", (size[0] * zoom, size[1] * zoom), _WHITE)
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(11 * zoom)

    def text(x, y, words, anchor="lm"):
        canvas.text((x * zoom, y * zoom), words, fill=_DARK, font=font, anchor=anchor)

    def bar(x, y, width, thickness, color):
        canvas.rectangle([v * zoom for v in (x, y, x + width, y + thickness)], fill=color)

    text(10, 14, title)
    for tenth in range(0, 11, 2):
        x = _LEFT + _WIDTH * tenth / 10
        bar(x, _TOP - 8, 0.5, height - _TOP - 14, _PALE)
        text(x, height - 12, f"{tenth * 10} %", "mm")
    y = _TOP
    for group in groups:
        text(10, y + len(group) * _BAR / 2, f"{group[0].case}, {group[0].work}")
        for row in group:
            width = _WIDTH * min(row.share_of_floor, 1.1)
            bar(_LEFT, y, width, _BAR - 3, COLORS.get(row.by, _OTHER))
            text(_LEFT + width + 4, y + _BAR / 2 - 1, f"{row.by} {row.share_of_floor:.0%}")
            y += _BAR
        y += _GAP
    image.quantize(64).save(path, format="PNG")
