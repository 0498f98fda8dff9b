"""Real megatron-core loads what mxjax exports, by its own defaults, and computes the same."""

from pathlib import Path

import numpy as np
import pytest

from mxjax.ckpt.exporting import MegatronTarget, export_megatron
from mxjax.ckpt.importing import import_megatron
from mxjax.ckpt.locate import locate
from mxjax.ckpt.logits import run_logits
from mxjax.ckpt.megatron.grid import Grid
from mxjax.ckpt.torch_format.distributed import DistCheckpoint

pytestmark = pytest.mark.interop

DATA = Path(__file__).parents[2] / "data"
MEGATRON = DATA / "megatron"
VERSIONS = ("0.19.2", "0.16.1")
SOURCES = {
    "dense": ("dense_tp1/torch_dist", ()),
    "mixtral": ("mixtral_tp2_ep2_etp1/torch", ("model.vocab_size=128",)),
    "deepseek": (
        "deepseek_tp2_ep2/torch",
        ("model.vocab_size=128", "model.rope_scaling.original_max_position_embeddings=64"),
    ),
}
"""Checkpoints with the logits that megatron-core 0.19.2 computed, and what to import them with."""

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
    """Each model in both formats, for one rank; with tokens and logits."""
    runs = {"tied": random_run("tied")}
    for name, (source, overrides) in SOURCES.items():
        runs[name] = folder / name
        import_megatron(MEGATRON / source, runs[name], overrides, progress=False)
    for name, run in runs.items():
        export_megatron(run, folder / f"{name}_torch_dist", MegatronTarget(), progress=False)
        for mtp_module in ("mtp_model_layer", "transformer_layer"):
            target = MegatronTarget("torch", transformer_impl="local", mtp_module=mtp_module)
            export_megatron(run, folder / f"{name}_torch_{mtp_module}", target, progress=False)
    tokens = np.random.default_rng(0).integers(0, 100, (2, 16))
    logits = {"tied": run_logits(runs["tied"], tokens, progress=False)}
    np.savez(folder / "tied.npz", tokens=tokens)
    for name, (source, _) in SOURCES.items():
        reference = MEGATRON / source.split("/")[0] / "reference.npz"
        (folder / f"{name}.npz").symlink_to(reference)
        with np.load(reference) as found:
            logits[name] = found["logits"]
    return logits


@pytest.fixture(scope="module")
def judged(folder, exports, judge):
    """What a release of megatron-core made of the exports: name, format, optimizer -> logits."""

    def run(version):
        mtp_module = "mtp_model_layer" if version == "0.19.2" else "transformer_layer"
        jobs = {}
        for name, kind, optimizer in (
            *((name, kind, None) for name in exports for kind in ("torch_dist", "torch")),
            ("dense", "torch_dist", "plain"),
            ("dense", "torch_dist", "distributed"),
            ("dense", "torch", "plain"),
        ):
            stem = f"{name}_{kind}" + (f"_{mtp_module}" if kind == "torch" else "")
            out = folder / f"{version}_{stem}_{optimizer}"
            job = {"load": str(locate(folder / stem).folder)}
            if (version, name) != ("0.16.1", "deepseek"):  # its MLA wants CUDA
                job |= {"tokens": str(folder / f"{name}.npz"), "logits": f"{out}.npz"}
            if optimizer:
                job |= {"optimizer": optimizer, "save": str(out)}
            jobs[name, kind, optimizer] = job
        if version == "0.19.2":
            source = DATA / "torch_files/megatron/dense_tp2_pp2_vpp2/torch_dist"
            jobs["resharded"] = {
                "load": str(locate(source).folder),
                "save": str(folder / "resharded"),
            }
        judge(version, list(jobs.values()))
        return jobs

    return {version: run(version) for version in VERSIONS}


@pytest.fixture(scope="module")
def regridded(folder, random_run, judge):
    """Exports for four ranks that Megatron loaded and wrote anew, and ours for no grid."""
    jobs = []
    for name, grid in GRIDS.items():
        run, out = random_run(name), folder / f"{name}_4"
        target = MegatronTarget("torch", grid, transformer_impl="local")
        export_megatron(run, out, target, progress=False)
        export_megatron(run, folder / f"{name}_4_dist", MegatronTarget(grid=grid), progress=False)
        sizes = {"tp": grid.tp, "pp": grid.pp, "vpp": grid.vpp, "ep": grid.ep, "dp": grid.dp}
        jobs.append(
            {
                "load": str(locate(out).folder),
                "grid": sizes | {"etp": grid.expert_tp},
                "optimizer": "plain",
                "save": str(folder / f"{name}_4_saved"),
            }
        )
    judge("0.19.2", jobs)


def assert_has(ours, theirs, rows=None):
    """Every entry of Megatron's checkpoint is in ours, with the same bits."""
    ours, theirs = DistCheckpoint(ours), DistCheckpoint(theirs)
    assert theirs.tensors
    for name, tensor in theirs.tensors.items():
        array = ours.tensors[name].numpy()
        array = (
            array[:rows]
            if name.endswith(("word_embeddings.weight", "output_layer.weight"))
            else array
        )
        np.testing.assert_array_equal(array, tensor.numpy(), err_msg=name, strict=True)
    assert theirs.byte_entries.keys() <= ours.byte_entries.keys()


@pytest.mark.parametrize("version", VERSIONS)
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
    assert compared == exports.keys() - ({"deepseek"} if version == "0.16.1" else set())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("torch_dist", "plain"), ("torch_dist", "distributed"), ("torch", "plain")],
)
def test_optimizers_take_the_state_of_adam(judged, folder, version, kind, optimizer):
    job = judged[version]["dense", kind, optimizer]
    assert_has(locate(folder / "dense_torch_dist").folder, Path(job["save"]))


@pytest.mark.parametrize("name", GRIDS)
def test_files_of_a_grid_are_those_that_megatron_reads(regridded, folder, name):
    assert_has(locate(folder / f"{name}_4_dist").folder, folder / f"{name}_4_saved")


def test_another_grid_is_what_megatron_makes_of_it(judged, folder, tmp_path):
    source = DATA / "torch_files/megatron/dense_tp2_pp2_vpp2/torch"
    import_megatron(source, tmp_path / "run", ("model.vocab_size=128",), progress=False)
    export_megatron(tmp_path / "run", tmp_path / "tp1", MegatronTarget(), progress=False)
    assert_has(locate(tmp_path / "tp1").folder, folder / "resharded")
