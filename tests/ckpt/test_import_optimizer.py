"""Adam's state and the position of a run in imports from Megatron; `test_import_schedule.py` has the
learning rate.

``tests/data/megatron/continued_*`` are runs of megatron-core 0.19.2 that `make_continued_run.py`
made: a checkpoint, the losses of the steps before and after it, and Adam's moments as torch had
them in memory. Larger grids are exported here and get flat buffers of this file's own making.
"""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from mxjax.ckpt.__main__ import main
from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.exporting import MegatronTarget, export_megatron
from mxjax.ckpt.importing import import_megatron, open_with_settings
from mxjax.ckpt.locate import locate
from mxjax.ckpt.mapping.matching import places
from mxjax.ckpt.mapping.megatron import megatron_table
from mxjax.ckpt.megatron.flat import bucket_sizes, slots
from mxjax.ckpt.megatron.grid import Grid
from mxjax.ckpt.run_arrays import RunArrays
from mxjax.ckpt.store import CheckpointStore
from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.archive_writer import save
from mxjax.ckpt.torch_format.distributed import DistCheckpoint
from mxjax.ckpt.torch_format.distributed_writer import DistWriter
from mxjax.ckpt.torch_format.values import Global
from mxjax.config import load_config, load_settings
from mxjax.sharding.mesh import build_mesh
from mxjax.training.programs import Programs

MEGATRON = Path(__file__).parent.parent / "data/megatron"
CONTINUED = ("continued_dense/torch", "continued_mixtral/torch_dist")
KINDS = ("param", "exp_avg", "exp_avg_sq")
FLOATS = (Global("torch", "float32"), Global("torch", "float32"))


def state(run):
    arrays = RunArrays(locate(run).folder)
    return {name: arrays.read(name) for name in arrays.shapes}


def assert_same_state(run, other):
    ours, theirs = state(run), state(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name, strict=True)


def table(source):
    settings = open_with_settings(source)[1].settings
    config = load_settings(settings, "arguments")
    return megatron_table(config.model, config.moe)


# -- against the real program ---------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTINUED)
def test_training_goes_on_as_in_megatron(tmp_path, name):
    """Two steps there, two here: losses and learning rates are those of four steps there."""
    run = tmp_path / "run"
    import_megatron(MEGATRON / name, run, progress=False)
    config = load_config(run / "config.yaml", ["parallel.dp=1"], lambda parallel: 1)
    programs = Programs(config, build_mesh(config.parallel, jax.devices()[:1]))
    training, metadata = CheckpointStore(run, config.checkpoint).restore(programs.abstract_state)
    assert (int(training.step), metadata["next_sample_index"]) == (2, 8)
    with np.load(MEGATRON / name.split("/")[0] / "run.npz") as found:
        tokens, losses, rates = found["tokens"], found["losses"], found["rates"]
    step = programs.step(config.moe.capacity_buckets[-1])
    for number in (2, 3):
        batch = {"tokens": tokens[number, None, :, :-1], "targets": tokens[number, None, :, 1:]}
        batch["segment_ids"] = np.ones_like(batch["tokens"])
        batch["positions"] = np.broadcast_to(np.arange(16, dtype=np.int32), (1, 4, 16))
        training, result = step(training, jax.device_put(batch, programs.batch_sharding))
        assert float(result.loss) == pytest.approx(losses[number], abs=1e-5)
        assert float(result.learning_rate) == pytest.approx(rates[number], rel=1e-6)


@pytest.mark.parametrize("name", CONTINUED)
def test_moments_are_those_that_torch_had(name):
    sections = table(MEGATRON / name)
    adam = open_with_settings(MEGATRON / name)[0].optimizer_state(sections)
    assert adam.count == 2
    with np.load(MEGATRON / name.split("/")[0] / "moments.npz") as found:
        expected = dict(found)
    for place in places(sections):
        for theirs in place.rule.theirs:
            names = place.names(theirs)
            spelled = [n.replace(".mlp.experts.", ".mlp.experts.local_experts.") for n in names]
            both = next(expected.pop(n) for n in spelled if n in expected)
            known = next(n for n in names if n in adam.names["exp_avg"])
            for kind, moment in zip(KINDS[1:], both, strict=True):
                np.testing.assert_array_equal(adam.moment(known, theirs, kind).numpy(), moment)
                assert np.any(moment)
    assert not expected


def test_moments_may_be_kept_in_bf16_and_go_back_as_fp32(tmp_path):
    """Rounded when they come in, as they are when they go out."""
    name = next(name for name in CONTINUED if "dense" in name)
    run, out, again = (tmp_path / folder for folder in ("run", "out", "again"))
    import_megatron(MEGATRON / name, run, ["optimizer.moments_dtype=bfloat16"], progress=False)
    export_megatron(run, out, MegatronTarget("torch_dist"), progress=False)
    import_megatron(out, again, ["model.vocab_size=32"], progress=False)  # without padding
    kept, returned = state(run), state(again)
    moments = [name for name in kept if ".mu." in name or ".nu." in name]
    assert moments
    for name in moments:
        assert (kept[name].dtype, returned[name].dtype) == ("bfloat16", "float32")
        np.testing.assert_array_equal(kept[name].astype(np.float32), returned[name], name)


# -- flat buffers of any grid ---------------------------------------------------------------------


def flatten(tensors):
    """Megatron's flat buffer: the last parameter first, each from a multiple of 64 on."""
    flat = np.zeros(0, np.float32)
    for tensor in reversed(tensors):
        padding = np.full(-len(flat) % 64, np.nan, np.float32)  # never to be read
        flat = np.concatenate([flat, padding, tensor.numpy().ravel()])
    return flat


def buffers_of(content, experts):
    """Flat buffers by chunk out of the plain optimizer of a rank; `experts`: None: of all."""
    chunks = [content[key] for key in sorted(content) if key.startswith("model")]
    parts = content["optimizer"] if isinstance(content["optimizer"], list) else None
    part = content["optimizer"] if parts is None else parts[bool(experts)]
    order = [  # names of the optimizer's parameters: with weight decay, without
        [
            (chunk, name)
            for chunk, weights in enumerate(chunks)
            for name, tensor in weights.items()
            if tensor is not None
            and not name.endswith("expert_bias")
            and experts in (None, ".mlp.experts." in name)
            and (len(tensor.shape) == 1) == plain
        ]
        for plain in (False, True)
    ]
    moments = dict(zip(order[0] + order[1], part["state"].values(), strict=True))
    found = []
    for chunk, weights in enumerate(chunks):
        names = [name for name in weights if (chunk, name) in moments]
        state = [{"param": weights[n]} | moments[chunk, n] for n in names]
        if names:
            found.append({kind: flatten([s[kind] for s in state]) for kind in KINDS})
    return found


def groups_of(optimizer):
    groups = [dict(group) for group in optimizer["param_groups"]]
    for group in groups:
        del group["params"]
    return {"optimizer": {"param_groups": groups}}


def distribute(folder):
    """Rewrites plain Adam of format ``torch`` as the distributed optimizer's ``distrib_optim.pt``.
    Returns the flat buffers by rank folder and optimizer."""
    flats = {}
    for file in sorted(folder.glob("iter_*/mp_rank_*/model_optim_rng.pt")):
        content = TorchArchive(file).load()
        split = isinstance(content["optimizer"], list)
        kinds = (False, True) if split else (None,)
        flats[file.parent.name] = found = [buffers_of(content, kind) for kind in kinds]
        states = [
            {"buckets_coalesced": True}
            | {
                i: {FLOATS: buffer | {"numel_unpadded": len(buffer["param"])}}
                for i, buffer in enumerate(buffers)
            }
            for buffers in found
        ]
        save(file.with_name("distrib_optim.pt"), states if split else states[0])
        old = content["optimizer"]
        content["optimizer"] = [groups_of(p) for p in old] if split else groups_of(old)
        save(file.with_suffix(".new"), content)
        file.with_suffix(".new").replace(file)
    return flats


def write_reshardable(source, folder, flats, grid):
    """A ``torch_dist`` checkpoint with these buffers in place of its optimizer state."""
    old, written = DistCheckpoint(locate(source).folder), set()
    with DistWriter(folder) as writer:
        for name, tensor in old.tensors.items():
            if not name.startswith("optimizer."):
                writer.add(name, tensor)
        for name, entry in old.byte_entries.items():
            writer.add_object(name, entry.load())
        for rank in grid.ranks():
            for chain, buffers in enumerate(flats[grid.folder(rank)]):
                group = rank.stage * grid.tp + rank.tensor
                if chain:
                    etp = rank.tensor % grid.expert_tp
                    group = (rank.stage * grid.ep + rank.expert) * grid.expert_tp + etp
                prefix = f"chained_{chain}." if grid.ep > 1 else ""
                prefix += f"optimizer.distributed.dp_group_idx_{group}."
                if prefix in written:
                    continue  # another rank has the same
                written.add(prefix)
                for number, buffer in enumerate(buffers):
                    key = f"gbuf_idx_{number}.dtype_(torch.float32, torch.float32).bucket_idx_0."
                    for kind, flat in buffer.items():
                        writer.add(prefix + key + kind, flat)
                steps = {"param_groups": [{"step": 28}]}
                writer.add_object(f"{prefix}optimizer/shard_0_1", [steps])
        (writer.folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


GRIDS = {"llama": Grid(tp=2, pp=2, vpp=2), "deepseek": Grid(tp=2, pp=2, ep=2)}
VOCABULARY = ("model.vocab_size=100",)
"""Cuts off the padding."""


@pytest.fixture(scope="module")
def flat(random_run, tmp_path_factory):
    """family -> a run, and its exports with flat buffers: ``torch`` and ``torch_dist``."""
    made = {}

    def make(family):
        if family not in made:
            run, grid, folder = random_run(family), GRIDS[family], tmp_path_factory.mktemp(family)
            target = MegatronTarget("torch", grid, transformer_impl="local")
            export_megatron(run, folder / "torch", target, progress=False)
            flats = distribute(folder / "torch")
            export_megatron(run, folder / "plain", MegatronTarget(grid=grid), progress=False)
            write_reshardable(folder / "plain", folder / "torch_dist", flats, grid)
            made[family] = run, folder
        return made[family]

    return make


@pytest.mark.parametrize(("family", "kind"), [("llama", "torch"), ("deepseek", "torch_dist")])
def test_flat_buffers_of_a_grid_give_the_whole_state(flat, tmp_path, family, kind):
    run, folder = flat(family)
    import_megatron(folder / kind, tmp_path / "run", VOCABULARY, progress=False)
    assert_same_state(run, tmp_path / "run")


def test_buckets_end_as_in_megatron():
    """By hand, from megatron-core's rule; the two buckets with an embedding alone are those of a
    real checkpoint with multi-token prediction."""
    assert bucket_sizes([100, 30, 70], [False] * 3, None) == [128 + 64 + 100]
    assert bucket_sizes([100, 30, 70], [False] * 3, 90) == [128 + 30, 100]
    assert bucket_sizes([100, 30, 70], [True, False, False], None) == [192, 100]
    assert slots([100, 30, 70], [292]) == [(0, 192), (0, 128), (0, 0)]
    assert slots([100, 30, 70], [158, 100]) == [(1, 0), (0, 128), (0, 0)]
    assert slots([100, 30, 70], [192, 100]) == [(1, 0), (0, 128), (0, 0)]
    assert slots([100, 30, 70], [291]) is None
    assert slots([100, 30], [292]) is None
    assert slots([100, 30, 70], [158]) is None


# -- what does not fit ------------------------------------------------------------------------------


def refused(source, target, said, overrides=VOCABULARY):
    with pytest.raises(CheckpointFormatError, match=f"(?s){said}.*--no-optimizer"):
        import_megatron(source, target, overrides, progress=False)
    assert not list(target.parent.glob("*run*"))


@pytest.fixture
def copied(flat, tmp_path):
    """A copy of the flat ``torch`` checkpoint, whose files a test may change."""
    shutil.copytree(flat("llama")[1] / "torch", tmp_path / "torch")
    return tmp_path / "torch", sorted((tmp_path / "torch").glob("iter_*/mp_rank_*/distrib*.pt"))


def test_missing_and_mixed_up_buffers_are_refused(copied, tmp_path):
    folder, files = copied
    files[0].rename(tmp_path / "aside")
    files[1].rename(files[0])  # of another stage
    refused(folder, tmp_path / "run", "do not fill")
    files[0].rename(files[1])
    shutil.copy(files[2], files[0])  # of another tensor rank: the same sizes
    refused(folder, tmp_path / "run", "fp32 weights of .* are not those of the model")
    files[0].unlink()
    refused(folder, tmp_path / "run", r"lacks the parts of tensor ranks \[0\] of 2")
    for file in files[1:]:
        file.unlink()
    refused(folder, tmp_path / "run", "has no distrib_optim.pt")
    import_megatron(folder, tmp_path / "run", VOCABULARY, progress=False, optimizer=False)
    assert not any(np.any(v) for n, v in state(tmp_path / "run").items() if "opt_state" in n)


def test_truncated_buffers_are_refused(copied, tmp_path):
    folder, files = copied
    files[0].rename(tmp_path / "aside")
    content = TorchArchive(tmp_path / "aside").load()
    (buffer,) = content[0].values()
    buffer["exp_avg"] = buffer["exp_avg"].numpy()[:-1]
    save(files[0], content)
    refused(folder, tmp_path / "run", "exp_avg should have .* elements .numel_unpadded.")
    files[0].unlink()
    buffer["numel_unpadded"] -= 1
    for kind in ("param", "exp_avg_sq"):
        buffer[kind] = buffer[kind].numpy()[:-1]
    save(files[0], content)
    refused(folder, tmp_path / "run", "elements, which the .* parameters .* do not fill")


def plain(edit):
    """A copy of the plain optimizer's checkpoint with a change to its content."""

    def make(folder):
        shutil.copytree(MEGATRON / "continued_dense/torch", folder)
        (file,) = folder.glob("iter_*/mp_rank_00/model_optim_rng.pt")
        content = TorchArchive(file).load()
        edit(content)
        save(file.with_suffix(".new"), content)
        file.with_suffix(".new").replace(file)
        return folder

    return make


def drop_parameter(content):
    content["optimizer"]["param_groups"][0]["params"].pop()


def swap_parameters(content):
    state = content["optimizer"]["state"]
    state[1], state[2] = state[2], state[1]


def split_group(content):
    groups = content["optimizer"]["param_groups"]
    groups.insert(1, groups[0] | {"max_lr": 1.0})


def step_apart(content):
    content["optimizer"]["state"][3]["step"] = np.float32(1)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (drop_parameter, "group 0 of the optimizer has 9 parameters, the model 10"),
        (swap_parameters, r"exp_avg of decoder.* should have shape \(.* another order"),
        (split_group, "decoupled_lr"),
        (step_apart, r"parameters after \[1, 2\] updates"),
    ],
)
def test_plain_state_of_other_parameters_is_refused(tmp_path, edit, said):
    refused(plain(edit)(tmp_path / "torch"), tmp_path / "run", said, ())


def change_group_sizes(source, target, edit):
    """A copy of a ``torch_dist`` checkpoint with other tensors."""
    old = DistCheckpoint(locate(source).folder)
    tensors = {name: tensor.numpy() for name, tensor in old.tensors.items()}
    edit(tensors)
    with DistWriter(target) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        for name, entry in old.byte_entries.items():
            writer.add_object(name, entry.load())
        (writer.folder / "metadata.json").write_text("{}")


BUCKET = (
    "optimizer.distributed.dp_group_idx_{}.gbuf_idx_0.dtype_(torch.float32, torch.float32)"
    ".bucket_idx_0.{}"
)


def swap_groups(tensors):
    first, second = (BUCKET.format(group, "param") for group in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def truncate(tensors):
    for kind in KINDS:
        name = BUCKET.format(1, kind)
        tensors[name] = tensors[name][:-64]


def drop_group(tensors):
    for kind in KINDS:
        for buffer in (0, 1):
            del tensors[BUCKET.format(3, kind).replace("gbuf_idx_0", f"gbuf_idx_{buffer}")]


def drop_kind(tensors):
    del tensors[BUCKET.format(2, "exp_avg_sq")]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (swap_groups, "whose fp32 weights are not those of the model"),
        (truncate, "that the model's parameters do not fill"),
        (drop_group, "of 3 groups of ranks for the model; the parallel sizes in `args` make 4"),
        (drop_kind, "should have param, exp_avg, exp_avg_sq of one size"),
    ],
)
def test_reshardable_state_that_does_not_fit_is_refused(flat, tmp_path, edit, said):
    change_group_sizes(flat("llama")[1] / "torch_dist", tmp_path / "changed", edit)
    refused(tmp_path / "changed", tmp_path / "run", said)


def test_command_takes_weights_alone(tmp_path, capsys):
    source, run = plain(split_group)(tmp_path / "torch"), tmp_path / "run"
    command = ["import", "--from", str(source), "--to", str(run)]
    assert main(command) == 2
    assert "--no-optimizer" in capsys.readouterr().err
    assert main([*command, "--no-optimizer"]) == 0
    assert "optimizer: fresh" in capsys.readouterr().out
