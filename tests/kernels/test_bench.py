"""`python -m mxjax.kernels`: measuring, and choosing by what was measured."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.config.schema import KernelOverrides, KernelsConfig
from mxjax.kernels import __main__ as command
from mxjax.kernels import implementation
from mxjax.kernels.bench import attention, cases, measure, timing, tune
from mxjax.kernels.implementation import Choice, choose, interpreted, selected
from mxjax.kernels.norm import rms_norm

CASES = cases.all_cases(small=True)


def test_bench_prints_and_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(measure.CEILINGS, "cpu", measure.Ceiling(1e9, 1e9))
    files = tmp_path / "results.json", tmp_path / "results.png"
    arguments = ["--op", "rms_norm", "--json", str(files[0]), "--png", str(files[1]), "--no-peers"]
    assert command.main(["bench", "--small", *arguments]) == 0
    content = json.loads(files[0].read_text())
    rows = content["results"]
    assert content["device"] == "cpu"
    # Mosaic kernels do not run on a CPU.
    assert [(row["by"], row["work"]) for row in rows] == [
        ("xla", "forward"),
        ("xla", "forward + backward"),
    ]
    # RMSNorm of 64 x 256 bf16: reads and writes once; back reads two and writes one.
    assert [row["bytes"] for row in rows] == [2 * 64 * 256 * 2, 5 * 64 * 256 * 2]
    assert rows[0]["share_of_floor"] == pytest.approx(rows[0]["bytes"] / 1e9 / rows[0]["seconds"])
    assert "RMSNorm 64x256" in capsys.readouterr().out
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bench", "--op", "softmax"],
            "--op softmax: there is no such op; known are add_layer_norm",
        ),
        (
            ["tune", "--small"],
            "nothing to tune: its kernels are for NVIDIA Hopper GPUs and this is 'cpu'",
        ),
        (
            ["bench", "--small", "--png", "x.png"],
            "--png x.png: it shows shares of the floor, and the ceilings of 'cpu' are not known",
        ),
    ],
)
def test_what_cannot_be_done_is_said(arguments, message, capsys):
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_bench_keeps_what_it_has(tmp_path, monkeypatch):
    found = measure.Result("swiglu", "SwiGLU", "forward", "xla", 1e-3, 10, 10, None)

    def interrupted(*_, **__):
        yield found
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", interrupted)
    file = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        command.main(["bench", "--small", "--json", str(file)])
    assert json.loads(file.read_text())["results"] == [dataclasses.asdict(found)]


def test_a_case_is_chosen_by_a_part_of_its_name(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "measure", lambda cases, *_, **__: seen.extend(cases) or ())
    assert command.main(["bench", "--op", "grouped_matmul", "--case", "E8"]) == 0
    assert [case.name for case in seen] == [
        "grouped E8 4096->14336 even",
        "grouped E8 4096->14336 skewed",
    ]


def test_a_call_is_timed_by_the_difference_of_one_chain_and_two(monkeypatch):
    """What it takes to send programs off and to wait for them drops out."""
    make = timing.random_floats((jax.ShapeDtypeStruct((4,), jnp.float32),))
    effort = timing.Effort(seconds=8.0, repeats=3, cache_bytes=0)
    timed = timing.Timing(lambda x: 2 * x, make, effort, least=1.0)
    clock = iter([0.0, 9.0, 0.0, 17.0] * 3)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert timed.seconds() == (17 - 9) / 8


def test_chained_calls_are_all_made_and_in_turn_with_each_set():
    results = jax.jit(timing.chain(lambda x: x + 1, 5))([(jnp.zeros(2),), (jnp.ones(2),)])
    assert [float(result[0]) for result in results] == [1, 2, 1, 2, 1]


def test_tuning_decides_what_runs(tmp_path, monkeypatch):
    """The fastest blocks, of the faster implementation, in the table that `choose` then reads."""
    (case,) = (case for case in CASES if case.op == "rms_norm")
    case = dataclasses.replace(case, blocks=case.blocks[:3])
    slow, broken, fast = case.blocks

    def timing_of(case, work, effort, implementation, blocks=None):
        if blocks == broken:
            raise RuntimeError("too much shared memory")
        seconds = {None: 5e-6, slow: 7e-6, fast: 3e-6}[blocks]
        return SimpleNamespace(seconds=lambda: seconds)

    monkeypatch.setattr(tune, "timing_of", timing_of)
    monkeypatch.setattr(implementation, "TUNING_FOLDER", tmp_path)
    path = implementation.tuning_path("cpu")
    path.write_text(json.dumps({"other": {"float32 8": {"implementation": "xla"}}}))
    tune.tune([case], timing.QUICK, path, report=lambda line: None)
    implementation.tuning_table.cache_clear()
    try:
        table = implementation.tuning_table("cpu")
        assert table["other"] == {"float32 8": {"implementation": "xla"}}
        of_case = partial(choose, "rms_norm", None, shape_class=case.shape_class)
        chosen = of_case(obstacles={"mosaic": None})
        assert chosen.implementation == "mosaic"
        assert type(fast)(**chosen.blocks) == fast
        # The table speaks of a class of shapes, of which the kernel may not take all.
        assert of_case(obstacles={"mosaic": "the width is odd"}) == Choice("xla")
        # Not measured: as the nearest class, of the same dtype.
        dtype, width = case.shape_class.split()
        wider = choose("rms_norm", None, shape_class=f"{dtype} {8 * int(width)}", obstacles={})
        assert wider == chosen
        other = choose("rms_norm", None, shape_class="float32 8", obstacles={"mosaic": None})
        assert other == Choice("xla")
    finally:
        implementation.tuning_table.cache_clear()


def test_only_what_has_a_choice_is_tuned(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "mosaic_obstacle", lambda: None)
    seen = []
    monkeypatch.setattr(command, "tune", lambda cases, *_: seen.extend(cases))
    out = ["--out", str(tmp_path / "table.json")]
    assert command.main(["tune", "--small", *out]) == 0
    assert [case.name for case in seen] == [case.name for case in CASES if case.blocks]
    assert command.main(["tune", "--small", "--op", "linear_cross_entropy", *out]) == 2
    assert "no block sizes to choose between" in capsys.readouterr().err


def test_attention_is_measured_with_documents_and_without(tmp_path):
    """On a CPU by XLA alone, each case forward and with its gradients."""
    file = tmp_path / "results.json"
    arguments = ["--op", "attention", "--json", str(file), "--no-peers"]
    assert command.main(["bench", "--small", *arguments]) == 0
    rows = json.loads(file.read_text())["results"]
    assert [(row["case"], row["by"], row["work"]) for row in rows] == [
        (f"{kind} {sizes}", "xla", work)
        for kind, sizes in (
            ("causal", "GQA B2 S256"),
            ("causal", "GQA B4 S128"),
            ("documents", "GQA B2 S256"),
            ("one document", "GQA B2 S256"),
            ("causal", "MLA B4 S128"),
            ("documents", "MLA B4 S128"),
        )
        for work in (measure.FORWARD, measure.BOTH)
    ]


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.op == "attention"], ids=lambda c: c.name
)
def test_work_of_attention_is_that_of_the_pairs_that_see_each_other(case):
    """Counted one by one in the arguments."""
    q, _, v, *ids = case.make(jax.random.key(0))
    (B, S, N, D), E = q.shape, v.shape[-1]
    ids = np.asarray(ids[0]) if ids else np.ones((B, S), int)
    pairs = sum(
        ids[b, query] == ids[b, key]
        for b in range(B)
        for query in range(S)
        for key in range(query + 1)
    )
    scores, out = 2 * D, 2 * E
    assert case.forward.flops == N * pairs * (scores + out)
    d_queries, d_keys, d_values, d_probs = 2 * D, 2 * D, 2 * E, 2 * E
    backward = N * pairs * (scores + d_queries + d_keys + d_values + d_probs)
    assert case.both.flops == case.forward.flops + backward


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("SwiGLU", 3, 5),  # both branches; their gradients
        ("bias-SwiGLU", 3, 5),
        ("bias-GELU", 2, 3),
        ("RMSNorm", 2, 3),
        ("LayerNorm", 2, 3),
        ("add + RMSNorm", 4, 4),  # two inputs and outputs; the sum, two gradients, and theirs
        ("add + LayerNorm", 4, 4),
        ("bias + dropout + add", 3, 2),  # the mask is drawn again, the residual's gradient is there
    ],
)
def test_work_of_an_elementwise_op_is_what_its_passes_read_and_write(name, forward, backward):
    """Arrays of [tokens, width] in bf16."""
    named = {case.name.rpartition(" ")[0]: case for case in cases.elementwise_cases(small=False)}
    case = named[name]
    tokens, width = map(int, case.name.rpartition(" ")[2].split("x"))
    one = 2 * tokens * width
    assert case.forward.bytes == forward * one
    assert case.both.bytes == (forward + backward) * one


@pytest.mark.parametrize(("B", "S"), [(2, 8192), (3, 100)])
def test_documents_fill_their_sequences(B, S):
    lengths = attention.document_lengths(B, S, 1000 if S > 1000 else 10)
    assert min(lengths) > 0
    # No document lies in two sequences.
    assert {S * b for b in range(1, B + 1)} <= set(np.cumsum(lengths))
    assert sum(lengths) == B * S
    ids = attention.segment_ids(B, S, lengths)
    assert (ids[:, 0] == 1).all()
    runs = [np.diff(np.flatnonzero(np.diff(row, prepend=0, append=0))) for row in ids]
    assert np.concatenate(runs).tolist() == lengths


def test_configuration_selects_implementations():
    """Everywhere, or for one op; a named argument goes before it."""
    x, scale = jnp.ones((2, 128)), jnp.ones(128)

    def runs_kernel(kernels, **named):
        with interpreted(), selected(kernels):
            jaxpr = jax.make_jaxpr(lambda x: rms_norm(x, scale, 1e-5, **named))(x)
        return "mpmd_map" in str(jaxpr)

    assert not runs_kernel(KernelsConfig())
    assert runs_kernel(KernelsConfig(implementation="mosaic"))
    one = KernelOverrides(rms_norm="mosaic")
    assert runs_kernel(KernelsConfig(implementation="xla", overrides=one))
    assert not runs_kernel(KernelsConfig(overrides=KernelOverrides(layer_norm="mosaic")))
    assert not runs_kernel(KernelsConfig(implementation="mosaic"), implementation="xla")


def test_every_measured_op_can_be_overridden():
    # Attention's implementation is chosen by `model.attention_implementation`.
    fields = {field.name for field in dataclasses.fields(KernelOverrides)} | {"attention"}
    assert {case.op for case in CASES if len(case.implementations) > 1} <= fields
    assert len({case.name for case in CASES}) == len(CASES)
