"""The timeline of a schedule as the papers draw it: a row for each rank, a box for each op.

`draw` decides where everything is; `to_svg` and `save_png` only write that down. Blue is F, teal B,
green W, orange BW; later chunks are darker; an overlapped pair is one box in two halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

from mxjax.pipeline.schedule import Kind
from mxjax.pipeline.simulate import Simulation

Color = tuple[int, int, int]

_SHADES: dict[Kind, tuple[Color, Color]] = {
    Kind.F: ((173, 206, 250), (32, 92, 182)),
    Kind.B: ((163, 226, 220), (8, 122, 118)),
    Kind.W: ((199, 228, 160), (76, 128, 32)),
    Kind.BW: ((255, 205, 140), (196, 98, 16)),
}
"""Colour of the first and of the last chunk."""

_NAMES = {
    Kind.F: "F forward",
    Kind.B: "B input gradient",
    Kind.W: "W weight gradient",
    Kind.BW: "BW both gradients",
}
_DARK: Color = (34, 34, 34)
_WHITE: Color = (255, 255, 255)
_IDLE: Color = (242, 242, 242)

_ROW, _GAP = 30.0, 5.0
_LEFT, _TOP, _MARGIN = 64.0, 40.0, 16.0
_FONT = 12.0
_LEAST_BOX = 20.0  # holds three digits
_LONGEST = 12_000.0


@dataclass(frozen=True)
class Box:
    """A filled rectangle, in pixels from the top left corner."""

    x: float
    y: float
    width: float
    height: float
    fill: Color


@dataclass(frozen=True)
class Label:
    """Text whose vertical middle is at y and whose start, middle or end is at x."""

    x: float
    y: float
    text: str
    color: Color = _DARK
    size: float = _FONT
    anchor: Literal["start", "middle", "end"] = "middle"


@dataclass(frozen=True)
class Picture:
    """Boxes, and labels on top of them."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    labels: tuple[Label, ...]


def draw(simulation: Simulation) -> Picture:
    """The timeline of a simulated schedule."""
    schedule = simulation.schedule
    chunk_of = [schedule.chunk_of(stage) for stage in range(schedule.num_stages)]
    boxes: list[Box] = []
    labels: list[Label] = []
    scale = _pixels_per_time(simulation)
    length = simulation.makespan * scale
    for rank, (cells, times) in enumerate(zip(schedule.cells, simulation.times, strict=True)):
        top = _TOP + rank * (_ROW + _GAP)
        labels.append(Label(_LEFT - 10, top + _ROW / 2, f"rank {rank}", anchor="end"))
        boxes.append(Box(_LEFT, top, length, _ROW, _IDLE))
        for cell, (start, end) in zip(cells, times, strict=True):
            x, width, height = _LEFT + start * scale, (end - start) * scale, _ROW / len(cell)
            for half, op in enumerate(cell):
                fill = shade(op.kind, chunk_of[op.stage], schedule.num_chunks)
                y = top + half * height
                # A white line at the right and below keeps neighbours of one colour apart.
                boxes.append(Box(x, y, max(width - 1, 0.5), height - (len(cell) > 1), fill))
                text = str(op.microbatch)
                if len(text) * _FONT * 0.6 < width:
                    ink = _DARK if is_light(fill) else _WHITE
                    labels.append(Label(x + (width - 1) / 2, y + height / 2, text, ink))
    bottom = _TOP + schedule.num_ranks * (_ROW + _GAP) + _MARGIN
    legend_end = _legend(simulation, bottom, boxes, labels)
    title = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches, "
        f"makespan {simulation.makespan:.4g}, {simulation.slowdown:.3f} x ideal"
    )
    labels.append(Label(_LEFT, _TOP / 2, title, size=14, anchor="start"))
    width = max(_LEFT + length, legend_end, _LEFT + len(title) * 7.5) + _MARGIN
    return Picture(width, bottom + 2 * _MARGIN, tuple(boxes), tuple(labels))


def shade(kind: Kind, chunk: int, num_chunks: int) -> Color:
    """Colour of the ops of one kind and chunk."""
    light, dark = _SHADES[kind]
    part = chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(light, dark, strict=True))
    return red, green, blue


def is_light(fill: Color) -> bool:
    """Whether dark text is read better than white on this ground (ITU-R BT.601 luma)."""
    red, green, blue = fill
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def to_svg(picture: Picture) -> str:
    """The picture as an SVG document."""
    width, height = f"{picture.width:.0f}", f"{picture.height:.0f}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for box in picture.boxes:
        lines.append(
            f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" '
            f'height="{box.height:.2f}" fill="{_hex(box.fill)}"/>'
        )
    for label in picture.labels:
        lines.append(
            f'<text x="{label.x:.2f}" y="{label.y:.2f}" font-size="{label.size:g}" '
            f'text-anchor="{label.anchor}" dominant-baseline="central" '
            f'fill="{_hex(label.color)}">{escape(label.text)}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def save_png(picture: Picture, path: str | Path) -> None:
    """Write the picture as a PNG file, two pixels for each of the picture's.

    Raises:
        ImportError: Pillow is not installed.
    """
    from PIL import Image, ImageDraw, ImageFont

    zoom = 2
    image = Image.new("RGB", (round(picture.width * zoom), round(picture.height * zoom)), _WHITE)
    canvas = ImageDraw.Draw(image)
    for box in picture.boxes:
        left, top = round(box.x * zoom), round(box.y * zoom)
        # Pillow draws the last row and column too.
        right = max(round((box.x + box.width) * zoom) - 1, left)
        bottom = max(round((box.y + box.height) * zoom) - 1, top)
        canvas.rectangle((left, top, right, bottom), fill=box.fill)
    anchors = {"start": "lm", "middle": "mm", "end": "rm"}
    for label in picture.labels:
        font = ImageFont.load_default(label.size * zoom)
        canvas.text(
            (label.x * zoom, label.y * zoom),
            label.text,
            fill=label.color,
            font=font,
            anchor=anchors[label.anchor],
        )
    image.save(path, format="PNG")


def _pixels_per_time(simulation: Simulation) -> float:
    durations = [end - start for rank in simulation.times for start, end in rank if end > start]
    return min(_LEAST_BOX / min(durations), _LONGEST / simulation.makespan)


def _legend(simulation: Simulation, top: float, boxes: list[Box], labels: list[Label]) -> float:
    """Adds a box and a name for each kind that occurs; returns where it ends."""
    schedule = simulation.schedule
    present = {op.kind for rank in range(schedule.num_ranks) for op in schedule.ops(rank)}
    x = _LEFT
    for kind in Kind:
        if kind not in present:
            continue
        for chunk in range(schedule.num_chunks):
            boxes.append(Box(x, top - 7, 14, 14, shade(kind, chunk, schedule.num_chunks)))
            x += 15
        labels.append(Label(x + 5, top, _NAMES[kind], anchor="start"))
        x += 5 + len(_NAMES[kind]) * 7 + 14
    if schedule.num_chunks > 1:
        labels.append(Label(x, top, "darker: later chunk", anchor="start"))
        x += 130
    return x


def _hex(color: Color) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)
