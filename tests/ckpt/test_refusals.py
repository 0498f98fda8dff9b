"""Hostile and unfit checkpoints are refused by `import` and by `init_from`, and nothing is written."""

import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.importing import import_checkpoint
from mxjax.ckpt.init_from import initialize
from mxjax.config import load_config

DATA = Path(__file__).parent.parent / "data"
MEGATRON = DATA / "megatron/mixtral_tp2_ep2_etp1/torch"
DIST = DATA / "megatron/continued_mixtral/torch_dist"
HUGGINGFACE = DATA / "huggingface/llama2"
EXPERTS = DATA / "huggingface/mixtral"


class Hostile:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def hostile_rank_file(folder):
    file = next(folder.glob("iter_*/mp_rank_00_000/model_optim_rng.pt"))
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            hostile = name.endswith("data.pkl")
            archive.writestr(name, pickle.dumps(Hostile(folder / "ran"), 2) if hostile else content)


def hostile_metadata(folder):
    (file,) = folder.glob("iter_*/.metadata")
    file.write_bytes(pickle.dumps(Hostile(folder / "ran")))


def truncated(pattern):
    def edit(folder):
        file = sorted(folder.glob(pattern))[-1]
        file.write_bytes(file.read_bytes()[:-200])

    return edit


def missing(pattern):
    return lambda folder: sorted(folder.glob(pattern))[-1].unlink()


def nothing(folder):
    pass


RANK = "iter_*/mp_rank_01_001/model_optim_rng.pt"
SHARD = "*.safetensors"


@pytest.mark.parametrize("use", ["import", "init_from"])
@pytest.mark.parametrize(
    ("source", "edit", "override", "said"),
    [
        (MEGATRON, hostile_rank_file, None, "model_optim_rng.pt.*mkdir"),
        (DIST, hostile_metadata, None, ".metadata.*mkdir"),
        (MEGATRON, truncated(RANK), None, "mp_rank_01_001"),
        (DIST, truncated("iter_*/*.distcp"), None, ".distcp"),
        (MEGATRON, missing(RANK), None, "mp_rank_01_001"),
        (DIST, missing("iter_*/*.distcp"), None, ".distcp"),
        (MEGATRON, nothing, "model.num_layers={more}", "not in the checkpoint:.*decoder.layers"),
        (MEGATRON, nothing, "moe.num_experts=8", "experts.*of shape"),
        (MEGATRON, nothing, "moe.num_experts=2", "unknown:.*experts|has shape"),
        (HUGGINGFACE, truncated(SHARD), None, "safetensors is truncated"),
        (HUGGINGFACE, missing(SHARD), None, "safetensors is missing"),
        (HUGGINGFACE, nothing, "model.num_layers={more}", "not in the checkpoint:.*layers"),
        (EXPERTS, nothing, "moe.num_experts=8", "experts.*of shape"),
        (EXPERTS, nothing, "moe.num_experts=2", "unknown:.*experts|has shape"),
    ],
)
def test_a_checkpoint_that_is_hostile_damaged_or_unfit_is_refused(
    good, tmp_path, use, source, edit, override, said
):
    config = good(source)
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    edit(folder)
    overrides = [override.format(more=config.model.num_layers + 2)] if override else []
    before = sorted(tmp_path.rglob("*"))
    settings = [*overrides, f"init_from.path={folder}"]
    uses = {
        "import": lambda: import_checkpoint(folder, tmp_path / "run", overrides, progress=False),
        # Refused before the programs are of any use.
        "init_from": lambda: initialize(
            load_config(f"{config.run_dir}/config.yaml", settings), None
        ),
    }
    with pytest.raises(CheckpointFormatError, match=f"(?s){said}"):
        uses[use]()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Configuration of the run that an unchanged checkpoint gives."""
    made, folder = {}, tmp_path_factory.mktemp("good")

    def run(source):
        if source not in made:
            path = folder / str(len(made))
            import_checkpoint(source, path, progress=False)
            made[source] = load_config(path / "config.yaml")
        return made[source]

    return run
