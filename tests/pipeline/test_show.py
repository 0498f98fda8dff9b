"""``python -m mxjax.pipeline show``: the grid, the figures, the files and the refusals."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from mxjax.pipeline.__main__ import main
from mxjax.pipeline.picture import draw, shade
from mxjax.pipeline.schedule import Kind, Schedule
from mxjax.pipeline.schedules import make_schedule
from mxjax.pipeline.simulate import Costs, simulate
from mxjax.pipeline.terminal import grid

GOLDEN = Path(__file__).parent.parent / "data" / "schedules"


def test_shows_the_grid_and_what_the_schedule_costs(capsys):
    assert main(["show", "--schedule", "1f1b", "--pp", "2", "--microbatches", "3"]) == 0
    assert capsys.readouterr().out == (
        "rank 0 F0 F1 ......BW0   F2 BW1   ...BW2   \n"
        "rank 1 ...F0 BW0   F1 BW1   F2 BW2   ......\n"
        "\n"
        "1f1b: 2 ranks, 3 microbatches; F 1, B 1, W 1, transfer 0\n"
        "makespan           12\n"
        "ideal              9\n"
        "makespan / ideal   1.3333\n"
        "bubble             3 (25.0%)\n"
        "bubble of a rank   3 (25.0%), from its own start to its own end\n"
        "transfers          6\n"
        "activations held   in microbatches of all layers of a rank, until B / until W\n"
        "  rank 0           2 / 2\n"
        "  rank 1           1 / 1\n"
    )


def test_json_is_the_format_of_schedule_files_and_comes_back_through_file(capsys, tmp_path):
    name = "dualpipev_torch_r4_m10"
    arguments = ["--schedule", "dualpipev", "--pp", "4", "--microbatches", "10"]
    assert main(["show", *arguments, "--json"]) == 0
    written = capsys.readouterr().out
    assert json.loads(written)["ops"] == json.loads((GOLDEN / f"{name}.json").read_text())["ops"]
    (tmp_path / "mine.json").write_text(written)
    assert main(["show", "--file", str(tmp_path / "mine.json"), "--json"]) == 0
    assert capsys.readouterr().out == written


def test_costs_decide_the_bubble(capsys):
    arguments = ["--schedule", "zbh1", "--pp", "2", "--microbatches", "4", "--costs", "2,3,1,0.5"]
    assert main(["show", *arguments]) == 0
    out = capsys.readouterr().out
    assert "F 2, B 3, W 1, transfer 0.5" in out
    expected = simulate(make_schedule("zbh1", 2, 4), Costs(2, 3, 1, transfer=0.5)).slowdown
    assert f"makespan / ideal   {expected:.4f}" in out


def test_more_activations_buy_a_smaller_bubble(capsys):
    arguments = ["--schedule", "zbh1", "--pp", "2", "--microbatches", "6", "--costs", "1,2,1"]
    assert main(["show", *arguments, "--max-activations", "4"]) == 0
    out = capsys.readouterr().out
    assert "zero bubble, 4 activations: 2 ranks" in out
    assert "bubble             1 (" in out


def test_chunks_are_letters_and_pairs_one_cell():
    lines = grid(simulate(make_schedule("dualpipev", 2, 4)), color=False, columns=None).splitlines()
    assert lines[0].startswith("rank 0 F0a F1a F2a F0b B0b W0b F1b F3a|BW1b")
    assert len({len(line) for line in lines}) == 1


def test_colour_has_the_numbers_alone_and_rows_break_at_the_width_of_the_terminal():
    result = simulate(make_schedule("interleaved", 2, 4))
    text = grid(result, color=True, columns=40)
    assert "\033[38;5;16;48;5;" in text
    plain = "".join(part.partition("m")[2] for part in ("m" + text).split("\033["))
    bands = plain.split("\n\n")
    assert len(bands) > 1
    assert max(map(len, plain.splitlines())) < 40
    row = "".join(band.splitlines()[0].removeprefix("rank 0 ") for band in bands)
    assert Counter(row.split()) == Counter("01230123" * 2)


def test_the_picture_has_each_op_where_the_simulation_has_it(tmp_path):
    result = simulate(make_schedule("zbh1", 2, 3), Costs(1, 2, 1))
    arguments = ["--schedule", "zbh1", "--pp", "2", "--microbatches", "3", "--costs", "1,2,1"]
    svg, png = tmp_path / "z.svg", tmp_path / "z.png"
    assert main(["show", *arguments, "--svg", str(svg), "--png", str(png)]) == 0

    namespace = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(svg.read_text())
    fills = Counter(box.get("fill") for box in root.iter(f"{namespace}rect"))
    texts = Counter(label.text for label in root.iter(f"{namespace}text"))
    for kind in (Kind.F, Kind.B, Kind.W):
        color = "#{:02x}{:02x}{:02x}".format(*shade(kind, 0, 1))
        assert fills[color] == 2 * 3 + 1, "two ranks, three microbatches and the legend"
    assert [texts[str(number)] for number in range(3)] == [6, 6, 6]

    picture = draw(result)
    with Image.open(png) as image:
        assert image.size == (round(picture.width * 2), round(picture.height * 2))
        box = next(b for b in picture.boxes if b.fill == shade(Kind.B, 0, 1))
        assert image.getpixel((round(box.x * 2) + 2, round(box.y * 2) + 2)) == box.fill
    scale = next(b for b in picture.boxes if b.fill == shade(Kind.F, 0, 1)).width + 1
    first_b = result.times[0][[str(c[0]) for c in result.schedule.cells[0]].index("B0.0")][0]
    assert box.x == pytest.approx(64 + first_b * scale)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "dualpipev", "--pp", "4", "--microbatches", "7"], "--microbatches: 7, but"),
        (["--schedule", "1f1b", "--pp", "4"], "--microbatches: is needed with --schedule"),
        (
            ["--schedule", "1f1b", "--pp", "4", "--microbatches", "8", "--vpp", "2"],
            "--vpp: 1f1b has 1",
        ),
        (
            ["--schedule", "1f1b", "--pp", "2", "--microbatches", "2", "--max-activations", "3"],
            "--max-activations: is for --schedule zbh1 alone",
        ),
        *(
            (
                [
                    "--schedule",
                    "zbh1",
                    "--pp",
                    "2",
                    "--microbatches",
                    "2",
                    "--max-activations",
                    "3",
                    *more,
                ],
                f"{more[0]}: a searched order has one form",
            )
            for more in (["--vpp", "3"], ["--cells", "joint"])
        ),
        (["--file", "{tmp}/none.json"], "none.json: No such file"),
        (["--file", "{golden}/gpipe_r4_m8.json", "--pp", "4"], "--pp: the file says that"),
        (["--file", "{tmp}/bad.json"], "rank 1: no input gradient of microbatch 1 in stage 1"),
    ],
)
def test_what_cannot_be_shown_is_refused(capsys, tmp_path, arguments, message):
    schedule = make_schedule("1f1b", 2, 2)
    cells = (schedule.cells[0], schedule.cells[1][:-1])
    Schedule("bad", 2, 2, (0, 1), cells).save(tmp_path / "bad.json")
    assert main(["show", *(a.format(tmp=tmp_path, golden=GOLDEN) for a in arguments)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("1,2", "'1,2' is not F,B,W"),
        ("1,x,1", "'1,x,1' is not F,B,W"),
        ("1,-1,1", "'1,-1,1': costs: -1.0 is not a time"),
        ("0,1,1", "'0,1,1': costs: F is 0"),
        ("1e308,1,1", "'1e308,1,1': costs: 1e+308 is not a time; all are 0 to 1e+30"),
        ("nan,1,1", "'nan,1,1': costs: nan is not a time"),
    ],
)
def test_bad_costs_are_refused(capsys, costs, message):
    with pytest.raises(SystemExit, match="2"):
        main(["show", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2", "--costs", costs])
    assert message in capsys.readouterr().err


def test_looking_at_schedules_does_not_wait_for_jax():
    code = "import sys, mxjax.pipeline.__main__, mxjax.pipeline.layout; print('jax' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"
