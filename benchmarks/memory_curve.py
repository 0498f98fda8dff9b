"""Peak memory and speed of recompute tiers as a picture.

    python benchmarks/memory_curve.py results.json ... --svg curve.svg

Each file is what `train_step.py --json` wrote. The first variant of a model is its reference: the
picture has every other one's peak and speed relative to it.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 720, 400, 60
PLACES = ((0, 17, "middle"), (8, 5, "start"), (0, -8, "middle"))
COLORS = ("#205cb6", "#ee803c", "#087a76", "#785aa0")


@dataclass(frozen=True)
class Point:
    """One variant; memory and speed in percent of the reference. The name is what it adds to that
    of the reference, or all of it."""

    name: str
    memory: float
    speed: float


def curves(files: list[Path]) -> dict[str, list[Point]]:
    """Points of each model under its name and that of its reference, the reference first and the
    others after it by memory.

    Raises:
      SystemExit: a file cannot be read, a model is there twice, or has no reference.
    """
    found: dict[str, list[Point]] = {}
    seen = set()
    for file in files:
        try:
            content = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise SystemExit(f"{file}: cannot be read: {error}") from None
        for model, variants in content.items():
            if model in seen:
                raise SystemExit(f"{file}: {model} is in another file too; draw one of them")
            seen.add(model)
            measured = {name: v for name, v in variants.items() if _is_measured(v)}
            reference = next(iter(variants), None)
            if reference not in measured:
                raise SystemExit(f"{file}: {model}: its first variant was not measured")
            points = [_point(name, v, reference, measured) for name, v in measured.items()]
            found[f"{model}, {reference}"] = [
                points[0],
                *sorted(points[1:], key=lambda point: -point.memory),
            ]
    if not found:
        raise SystemExit(f"{', '.join(map(str, files))}: there are no models")
    return found


KEYS = ("peak_memory_bytes", "tokens_per_second_per_device")


def _is_measured(figures: dict) -> bool:
    return all(figures.get(key) is not None for key in KEYS)


def _point(name: str, figures: dict, reference: str, measured: dict[str, dict]) -> Point:
    memory, speed = (100 * figures[key] / measured[reference][key] for key in KEYS)
    return Point(name.removeprefix(f"{reference}-"), memory, speed)


def picture(models: dict[str, list[Point]]) -> str:
    """As SVG: memory to the right, speed upwards, a line for each model."""
    points = [point for of_model in models.values() for point in of_model]
    left, right = min(p.memory for p in points) - 3, max(p.memory for p in points) + 5
    low, high = min(p.speed for p in points) - 2, max(p.speed for p in points) + 2

    def at(memory: float, speed: float) -> tuple[float, float]:
        x = MARGIN + (memory - left) / (right - left) * (WIDTH - 2 * MARGIN)
        return x, HEIGHT - MARGIN - (speed - low) / (high - low) * (HEIGHT - 2 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]

    def text(x: float, y: float, words: str, anchor: str = "start", color: str = "#222") -> None:
        parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">'
            f"{escape(words)}</text>"
        )

    def line(ends: list[tuple[float, float]], color: str, width: float) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in ends)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'
        )

    for memory in range(5 * math.ceil(left / 5), int(right) + 1, 5):
        x, bottom = at(memory, low)
        line([(x, MARGIN), (x, bottom)], "#ddd", 1)
        text(x, bottom + 18, f"{memory} %", "middle")
    for speed in range(2 * math.ceil(low / 2), int(high) + 1, 2):
        start, y = at(left, speed)
        line([(start, y), (WIDTH - MARGIN, y)], "#ddd", 1)
        text(start - 6, y + 4, f"{speed} %", "end")
    text(WIDTH / 2, HEIGHT - 12, "peak memory", "middle")
    text(MARGIN, MARGIN - 14, "tokens/s")
    for number, (model, of_model) in enumerate(models.items()):
        color = COLORS[number % len(COLORS)]
        along = sorted(of_model, key=lambda point: point.memory)
        line([at(p.memory, p.speed) for p in along], color, 2)
        for place, p in enumerate(of_model):
            x, y = at(p.memory, p.speed)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
            if place:  # in turn below, beside and above, for those that lie close together
                beside, below, anchor = PLACES[place % len(PLACES)]
                text(x + beside, y + below, p.name, anchor, color)
        text(WIDTH - MARGIN, MARGIN - 14 - 16 * number, f"{model}: 100 %", "end", color)
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--svg", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    if not arguments.svg.absolute().parent.is_dir():
        parser.error(f"--svg {arguments.svg}: there is no such folder")
    arguments.svg.write_text(picture(curves(arguments.results)))


if __name__ == "__main__":
    main()
