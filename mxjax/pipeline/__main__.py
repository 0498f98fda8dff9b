"""Look at pipeline schedules, without devices.

Exit codes: 0 done, 2 there is no such schedule or it cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mxjax.pipeline.picture import draw, save_png, to_svg
from mxjax.pipeline.schedule import Schedule, ScheduleError
from mxjax.pipeline.schedules import SCHEDULES, make_schedule
from mxjax.pipeline.simulate import Costs, simulate
from mxjax.pipeline.terminal import grid, report
from mxjax.pipeline.validate import validate
from mxjax.pipeline.zero_bubble import search_zero_bubble

_OPTIONS = {
    "num_ranks": "--pp",
    "num_microbatches": "--microbatches",
    "num_chunks": "--vpp",
    "cells": "--cells",
    "costs": "--costs",
    "max_activations": "--max-activations",
}
"""What arguments are called on this command line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return _show(arguments)
    except ScheduleError as error:
        key = _OPTIONS.get(error.key or "", "")
        print(f"{key}: {error.message}" if key else error.message, file=sys.stderr)
    except OSError as error:
        named = error.filename is not None
        print(f"{error.filename}: {error.strerror}" if named else error, file=sys.stderr)
    except ImportError:
        print("--png needs Pillow: pip install 'mxjax[pictures]', or use --svg", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mxjax.pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="draw a schedule and say what it costs")
    which = show.add_mutually_exclusive_group(required=True)
    which.add_argument("--schedule", choices=SCHEDULES, help="a published schedule")
    which.add_argument("--file", type=Path, help="a schedule file, which is checked first")
    show.add_argument("--pp", type=int, metavar="P", help="pipeline ranks")
    show.add_argument("--microbatches", type=int, metavar="M", help="microbatches of a step")
    show.add_argument("--vpp", type=int, metavar="V", help="chunks of a rank, for interleaved")
    show.add_argument(
        "--cells",
        choices=["full", "split", "joint"],
        help="backward as one cell BW (default), as B and W, or in a pair F|BW",
    )
    show.add_argument(
        "--max-activations",
        type=int,
        metavar="N",
        help="with zbh1: search an order for these costs that holds at most N microbatches",
    )
    show.add_argument(
        "--costs",
        type=_costs,
        default=Costs(),
        metavar="F,B,W[,C]",
        help="times of forward, input and weight gradients of all layers of a rank for one "
        "microbatch, and of a transfer (default 1,1,1,0)",
    )
    show.add_argument("--json", action="store_true", help="print the schedule as a schedule file")
    show.add_argument("--svg", type=Path, metavar="FILE", help="draw into an SVG file")
    show.add_argument("--png", type=Path, metavar="FILE", help="draw into a PNG file")
    return parser


def _costs(text: str) -> Costs:
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4):
        raise argparse.ArgumentTypeError(f"{text!r} is not F,B,W or F,B,W,C")
    try:
        return Costs(*numbers[:3], transfer=sum(numbers[3:]))
    except ScheduleError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _show(arguments: argparse.Namespace) -> int:
    schedule = _schedule(arguments)
    simulation = simulate(schedule, arguments.costs)
    if arguments.json:
        print(json.dumps(schedule.to_json(), indent=1))
    else:
        terminal = sys.stdout.isatty()
        color = terminal and "NO_COLOR" not in os.environ
        columns = shutil.get_terminal_size().columns if terminal else None
        print(grid(simulation, color, columns), report(simulation), sep="\n\n")
    if arguments.svg or arguments.png:
        picture = draw(simulation)
        if arguments.svg:
            arguments.svg.write_text(to_svg(picture), encoding="utf-8")
        if arguments.png:
            save_png(picture, arguments.png)
    return 0


def _schedule(arguments: argparse.Namespace) -> Schedule:
    made_from = ("pp", "microbatches", "vpp", "cells", "max_activations")
    if arguments.file:
        given = [name for name in made_from if getattr(arguments, name) is not None]
        if given:
            option = given[0].replace("_", "-")
            raise ScheduleError(f"--{option}: the file says that; remove it")
        schedule = Schedule.load(arguments.file)
        validate(schedule, forward_only=schedule.forward_only)
        return schedule
    missing = [name for name in made_from[:2] if getattr(arguments, name) is None]
    if missing:
        raise ScheduleError(f"--{missing[0]}: is needed with --schedule")
    if arguments.max_activations is not None:
        if arguments.schedule != "zbh1":
            raise ScheduleError("--max-activations: is for --schedule zbh1 alone; remove it")
        for option in ("vpp", "cells"):
            if getattr(arguments, option) is not None:
                raise ScheduleError(f"--{option}: a searched order has one form; remove it")
        return search_zero_bubble(
            arguments.pp, arguments.microbatches, arguments.costs, arguments.max_activations
        )
    return make_schedule(
        arguments.schedule,
        arguments.pp,
        arguments.microbatches,
        arguments.vpp,
        arguments.cells or "full",
    )


if __name__ == "__main__":
    sys.exit(main())
