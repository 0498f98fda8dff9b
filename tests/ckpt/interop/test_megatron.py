"""Real megatron-core loads what mxjax exports, by its own defaults, and computes the same."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mxjax.ckpt.exporting import MegatronTarget, export_megatron
from mxjax.ckpt.importing import import_megatron
from mxjax.ckpt.locate import locate
from mxjax.ckpt.logits import run_logits
from mxjax.ckpt.megatron.grid import Grid
from mxjax.ckpt.torch_format.distributed import DistCheckpoint
from mxjax.config import load_config
from mxjax.training.optimizer import learning_rate

pytestmark = pytest.mark.interop

DATA = Path(__file__).parents[2] / "data"
MEGATRON = DATA / "megatron"
PIPELINED = DATA / "torch_files/megatron/dense_tp2_pp2_vpp2"
STEP = 30
"""Of the random runs."""

SOURCES = {
    "dense": ("dense_tp1/torch_dist", ()),
    "mixtral": ("mixtral_tp2_ep2_etp1/torch", ("model.vocab_size=128",)),
    "deepseek": (
        "deepseek_tp2_ep2/torch",
        ("model.vocab_size=128", "model.rope_scaling.original_max_position_embeddings=64"),
    ),
}
"""Checkpoints with the logits that megatron-core 0.19.2 computed, and what to import them with."""

FAMILIES = {"0.19.2": ("tied", *SOURCES), "0.16.1": ("tied", "deepseek")}
"""What each release loads. The MLA of 0.16.1 computes nothing without CUDA."""

FORMATS = ("torch_dist", "torch")
OPTIMIZERS = (("torch_dist", "plain"), ("torch_dist", "distributed"), ("torch", "plain"))

GRIDS = {
    "llama": Grid(tp=2, pp=2, vpp=2),
    "tied": Grid(tp=2, pp=2),
    "mixtral": Grid(tp=2, ep=2, etp=1, pp=2),
    "deepseek": Grid(pp=2, ep=2),
}
"""Four ranks each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("interop")


@pytest.fixture(scope="module")
def exports(folder, random_run):
    """Each model in both formats, for one rank: name -> logits that it should give."""
    runs = {"tied": random_run("tied")}
    for name, (source, overrides) in SOURCES.items():
        runs[name] = folder / name
        import_megatron(MEGATRON / source, runs[name], overrides, progress=False)
    for name, run in runs.items():
        export_megatron(run, folder / f"{name}_torch_dist", MegatronTarget(), progress=False)
        for version, families in FAMILIES.items():
            mtp = "mtp_model_layer" if version == "0.19.2" else "transformer_layer"
            target = MegatronTarget("torch", transformer_impl="local", mtp_module=mtp)
            if name in families:
                out = folder / f"{name}_torch_{version}"
                export_megatron(run, out, target, progress=False)
    tokens = np.random.default_rng(0).integers(0, 100, (2, 16))
    np.savez(folder / "tied.npz", tokens=tokens)
    logits = {"tied": run_logits(runs["tied"], tokens, progress=False)}
    for name, (source, _) in SOURCES.items():
        reference = MEGATRON / source.split("/")[0] / "reference.npz"
        (folder / f"{name}.npz").symlink_to(reference)
        with np.load(reference) as found:
            logits[name] = found["logits"]
    return logits


@pytest.fixture(scope="module")
def regridded(folder, random_run):
    """Jobs: to load exports for four ranks and to write them anew; with ours for no grid."""
    jobs = {}
    for name, grid in GRIDS.items():
        run, out = random_run(name), folder / f"{name}_4"
        target = MegatronTarget("torch", grid, transformer_impl="local")
        export_megatron(run, out, target, progress=False)
        export_megatron(run, folder / f"{name}_4_dist", MegatronTarget(grid=grid), progress=False)
        sizes = {"tp": grid.tp, "pp": grid.pp, "vpp": grid.vpp, "ep": grid.ep, "dp": grid.dp}
        jobs[name] = {
            "load": str(locate(out).folder),
            "grid": sizes | {"etp": grid.expert_tp},
            "optimizer": "plain",
            "save": str(folder / f"{name}_4_saved"),
        }
    return jobs


@pytest.fixture(scope="module")
def judged(folder, exports, regridded, judge):
    """What each release of megatron-core did: version -> key -> job."""

    def jobs_of(version):
        jobs = {}
        for name in FAMILIES[version]:
            for kind in FORMATS:
                stem = f"{name}_{kind}" + (f"_{version}" if kind == "torch" else "")
                jobs[name, kind] = job = {"load": str(locate(folder / stem).folder)}
                if (version, name) != ("0.16.1", "deepseek"):
                    logits = str(folder / f"{version}_{stem}.npz")
                    job |= {"tokens": str(folder / f"{name}.npz"), "logits": logits}
        for kind, optimizer in OPTIMIZERS:
            out = folder / f"{version}_{kind}_{optimizer}"
            jobs[kind, optimizer] = {
                "load": jobs["tied", kind]["load"],
                "optimizer": optimizer,
                "save": str(out),
                "rates": f"{out}.npz",
            }
        if version == "0.19.2":
            jobs["resharded"] = {
                "load": str(locate(PIPELINED / "torch_dist").folder),
                "save": str(folder / "resharded"),
            }
            jobs |= regridded
        return jobs

    jobs = {version: jobs_of(version) for version in FAMILIES}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda v: judge(v, list(jobs[v].values())), jobs))
    return jobs


def assert_has(ours, theirs):
    """Every entry of Megatron's checkpoint is in ours, with the same bits."""
    ours, theirs = DistCheckpoint(ours), DistCheckpoint(theirs)
    assert theirs.tensors
    for name, tensor in theirs.tensors.items():
        array = ours.tensors[name].numpy()
        np.testing.assert_array_equal(array, tensor.numpy(), err_msg=name, strict=True)
    assert theirs.byte_entries.keys() <= ours.byte_entries.keys()


@pytest.mark.parametrize("version", FAMILIES)
def test_loads_by_default_strictness_with_the_same_logits(judged, exports, version):
    compared = set()
    for key, job in judged[version].items():
        if "logits" in job:
            expected = exports[key[0]]
            with np.load(job["logits"]) as found:
                logits = found["logits"][..., : expected.shape[-1]]
            expected = expected[..., : logits.shape[-1]]
            gap = np.abs(logits - expected).max() / np.abs(expected).max()
            assert gap < 1e-5, key
            compared.add(key[0])
    assert compared == set(FAMILIES[version]) - ({"deepseek"} if version == "0.16.1" else set())


@pytest.mark.parametrize("version", FAMILIES)
@pytest.mark.parametrize(("kind", "optimizer"), OPTIMIZERS)
def test_optimizers_take_the_state_of_adam(judged, folder, version, kind, optimizer):
    job = judged[version][kind, optimizer]
    assert_has(locate(folder / "tied_torch_dist").folder, Path(job["save"]))


@pytest.mark.parametrize("version", FAMILIES)
def test_the_learning_rate_goes_on_as_it_would_here(judged, random_run, version):
    config = load_config(random_run("tied") / "config.yaml")
    rate = learning_rate(config.optimizer, config.training.num_steps)
    expected = [rate(step) for step in range(STEP, config.training.num_steps)]
    for key in OPTIMIZERS:
        with np.load(judged[version][key]["rates"]) as found:
            np.testing.assert_allclose(found["rates"][: len(expected)], expected, atol=1e-9)


@pytest.mark.parametrize("name", GRIDS)
def test_files_of_a_grid_are_those_that_megatron_reads(judged, folder, name):
    ours = locate(folder / f"{name}_4_dist").folder
    assert_has(ours, Path(judged["0.19.2"][name]["save"]))


def test_another_grid_is_what_megatron_makes_of_it(judged, folder, tmp_path):
    run = tmp_path / "run"
    import_megatron(PIPELINED / "torch", run, ("model.vocab_size=128",), progress=False)
    export_megatron(run, tmp_path / "tp1", MegatronTarget(), progress=False)
    assert_has(locate(tmp_path / "tp1").folder, folder / "resharded")
