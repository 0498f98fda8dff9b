"""CheckpointStore in one process of eight devices."""

import contextlib
import json
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mxjax.ckpt.store import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointRestoreError,
    CheckpointSaveError,
    CheckpointStore,
)
from mxjax.config.schema import CheckpointConfig


@jax.tree_util.register_dataclass
@dataclass
class State:
    step: Any
    params: Any
    opt: Any


def random_bits(seed: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Any bit pattern, NaN payloads and subnormals among them."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return raw.view(dtype).reshape(shape)


def make_mesh(**axes: int) -> Mesh:
    sizes = tuple(axes.values())
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple(axes))


def make_state(mesh: Mesh, matrix: P, vector: P) -> State:
    def put(array: Any, spec: P) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, spec))

    params = {
        "embed": put(random_bits(0, (16, 8), np.float32), matrix),
        "layers": [
            {"w": put(random_bits(1, (8, 16), jnp.bfloat16), matrix)},
            {"scale": put(random_bits(2, (8,), jnp.bfloat16), vector)},
        ],
    }
    opt = optax.adamw(1e-3).init(params)
    filled = [
        put(random_bits(10 + i, leaf.shape, leaf.dtype), matrix if leaf.ndim == 2 else P())
        for i, leaf in enumerate(jax.tree.leaves(opt))
    ]
    return State(
        step=put(np.int32(7), P()),
        params=params,
        opt=jax.tree.unflatten(jax.tree.structure(opt), filled),
    )


def abstract(state: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def open_store(run_dir: Path, **config: Any):
    settings = {"save_interval": 1} | config
    return contextlib.closing(CheckpointStore(run_dir, CheckpointConfig(**settings)))


@pytest.fixture
def state() -> State:
    return make_state(make_mesh(dp=4, tp=2), P("dp", "tp"), P())


@pytest.mark.parametrize("async_save", [True, False])
def test_state_and_metadata_come_back_bit_for_bit(tmp_path, state, async_save):
    metadata = {"next_sample_index": 123456789012, "mesh": {"dp": 4, "tp": 2}, "note": None}
    with open_store(tmp_path, async_save=async_save) as store:
        store.save(7, state, metadata)
        store.wait()
        assert store.latest_step() == 7
    with open_store(tmp_path) as store:
        restored, restored_metadata = store.restore(abstract(state))
    assert_same_bits(restored, state)
    assert restored_metadata == metadata
    for leaf, original in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert leaf.sharding == original.sharding


def test_a_synchronous_save_is_committed_when_it_returns(tmp_path, state):
    with open_store(tmp_path, async_save=False) as store:
        store.save(1, state, {})
        assert store.latest_step() == 1


def test_state_moves_between_device_counts_and_axis_layouts(tmp_path, state):
    """8 -> 4 -> 1 -> 2 devices, each time saved again from the new mesh."""
    layouts = [
        make_state(make_mesh(tp=2, ep=2), P("ep", "tp"), P(("ep", "tp"))),
        make_state(make_mesh(dp=1), P(), P()),
        make_state(make_mesh(pp=1, dp=2), P(None, "dp"), P("dp")),
    ]
    current = state
    with open_store(tmp_path) as store:
        for step, layout in enumerate(layouts):
            store.save(step, current, {})
            store.wait()
            current, _ = store.restore(abstract(layout))
            assert_same_bits(current, state)
            for leaf, target in zip(jax.tree.leaves(current), jax.tree.leaves(layout), strict=True):
                assert leaf.sharding == target.sharding


def test_buffers_may_be_donated_right_after_save(tmp_path):
    sharding = NamedSharding(make_mesh(dp=8), P("dp"))
    state = {"w": jax.device_put(random_bits(0, (1024, 512), np.float32), sharding)}
    saved = {"w": np.array(state["w"])}
    overwrite = jax.jit(lambda s: jax.tree.map(jnp.zeros_like, s), donate_argnums=0)
    with open_store(tmp_path) as store:
        target = abstract(state)
        store.save(1, state, {})
        for _ in range(3):
            state = overwrite(state)
        jax.block_until_ready(state)
        store.wait()
        restored, _ = store.restore(target)
    assert_same_bits(restored, saved)


def test_the_last_checkpoints_and_every_kth_are_kept(tmp_path, state):
    with open_store(tmp_path, keep_last=2, keep_every=4) as store:
        for step in range(1, 11):
            store.save(step, state, {})
    with open_store(tmp_path) as store:
        assert store.steps() == [4, 8, 9, 10]


def test_what_a_killed_run_left_is_ignored_and_removed_but_nothing_else(tmp_path, state):
    with open_store(tmp_path) as store:
        store.save(3, state, {})
    checkpoints = tmp_path / "checkpoints"
    for name in ["4.orbax-checkpoint-tmp", "12.orbax-checkpoint-tmp-1700000000"]:
        (checkpoints / name / "state").mkdir(parents=True)
    others = {"4.orbax-checkpoint-tmp.mine", "best", "old.orbax-checkpoint-tmp"}
    for name in others:
        (checkpoints / name).mkdir()

    with open_store(tmp_path, save_interval=0) as store:
        assert store.steps() == [3]
    assert (checkpoints / "4.orbax-checkpoint-tmp").exists(), "a reader must not clean"

    with open_store(tmp_path) as store:
        assert {entry.name for entry in checkpoints.iterdir()} == {"3"} | others
        store.save(4, state, {})
        store.wait()
        assert store.steps() == [3, 4]


@contextlib.contextmanager
def no_file_larger_than(size: int):
    """Makes writes fail with an operating system error, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_background_save_surfaces_at_check_and_the_step_can_be_saved_again(tmp_path):
    state = {"w": jnp.asarray(random_bits(0, (512, 1024), np.uint32))}
    with open_store(tmp_path) as store:
        store.save(1, state, {})
        store.wait()
        with no_file_larger_than(100_000):
            store.save(2, state, {})
            with pytest.raises(CheckpointSaveError, match="File too large") as raised:
                poll(store.check)
        assert f"Checkpoint 2 was not saved to {tmp_path / 'checkpoints'}" in str(raised.value)
        store.check()
        assert store.latest_step() == 1

        store.save(2, state, {"again": True})
        store.wait()
        assert store.latest_step() == 2
        assert store.restore(abstract(state))[1] == {"again": True}


@pytest.mark.parametrize("method", ["wait", "close", "save"])
def test_a_failed_background_save_surfaces_at_the_next_call_that_waits(tmp_path, method):
    state = {"w": jnp.asarray(random_bits(0, (512, 1024), np.uint32))}
    store = CheckpointStore(tmp_path, CheckpointConfig(save_interval=1))
    with no_file_larger_than(100_000):
        store.save(2, state, {})
        arguments = (3, state, {}) if method == "save" else ()
        with pytest.raises(CheckpointSaveError, match="Checkpoint 2 was not saved"):
            getattr(store, method)(*arguments)
    store.close()


def poll(check, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        check()
        time.sleep(0.01)


def test_a_directory_that_becomes_a_file_is_reported_by_save(tmp_path, state):
    with open_store(tmp_path) as store:
        store.save(1, state, {})
        store.wait()
        (tmp_path / "checkpoints").rename(tmp_path / "moved")
        (tmp_path / "checkpoints").write_text("in the way")
        with pytest.raises(CheckpointSaveError, match=r"Checkpoint 2 .*\n?.*Not a directory"):
            store.save(2, state, {})


def test_each_differing_leaf_is_listed_with_both_shapes(tmp_path):
    one = NamedSharding(make_mesh(dp=1), P())

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=one)

    saved = {
        "params": {"wq": jnp.zeros((8, 16)), "wk": jnp.zeros((8, 4), jnp.bfloat16)},
        "bias": jnp.zeros(3),
    }
    wanted = {
        "params": {"wq": struct((8, 32), jnp.float32), "wk": struct((8, 4), jnp.float32)},
        "experts": [struct((2, 8), jnp.bfloat16)],
    }
    with open_store(tmp_path) as store:
        store.save(5, saved, {})
        store.wait()
        with pytest.raises(CheckpointMismatchError) as raised:
            store.restore(wanted)
    lines = str(raised.value).splitlines()
    assert lines[0] == f"Checkpoint 5 in {tmp_path / 'checkpoints'} does not fit this run's state:"
    assert lines[1:-1] == [
        "  bias: not expected, the checkpoint has (3,) float32",
        "  experts.0: not in the checkpoint, expected (2, 8) bfloat16",
        "  params.wk: the checkpoint has (8, 4) bfloat16, expected (8, 4) float32",
        "  params.wq: the checkpoint has (8, 16) float32, expected (8, 32) float32",
    ]
    assert "run_dir" in lines[-1]


def damaged_run(run_dir: Path, state: Any, file: str) -> Path:
    """A run whose newest checkpoint, 2, has a file of half its length."""
    with open_store(run_dir) as store:
        store.save(1, state, {"step": 1})
        store.save(2, state, {"step": 2})
    files = (run_dir / "checkpoints" / "2").glob(file)
    path = max(files, key=lambda path: path.stat().st_size)
    os.truncate(path, path.stat().st_size // 2)
    return path


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("state/ocdbt.process_0/d/*", '"w/0.0" in OCDBT database at local file "{step}/state/"'),
        ("state/manifest.ocdbt", "{file}"),
        ("state/_METADATA", "{file}"),
        ("metadata/metadata", "{file}"),
    ],
)
def test_a_truncated_newest_checkpoint_is_an_error_that_names_the_way_out(tmp_path, file, named):
    state = {"w": jnp.asarray(random_bits(0, (512, 512), np.uint32))}
    path = damaged_run(tmp_path, state, file)
    step = tmp_path / "checkpoints" / "2"
    with open_store(tmp_path) as store:
        with pytest.raises(CheckpointRestoreError) as raised:
            store.restore(abstract(state))
        message = str(raised.value)
        assert "Checkpoint 2 in" in message
        assert named.format(step=step, file=path) in message
        assert "tensorstore_spec" not in message
        assert f"move {step} elsewhere, set checkpoint.restore_step to 1" in message
        assert store.latest_step() == 2

    step.rename(tmp_path / "damaged")
    with open_store(tmp_path, restore_step=1) as store:
        restored, metadata = store.restore(abstract(state))
    assert_same_bits(restored, state)
    assert metadata == {"step": 1}


def test_a_folder_without_a_checkpoint_in_it_is_not_passed_over(tmp_path, state):
    with open_store(tmp_path) as store:
        (store.directory / "9").mkdir()
        with pytest.raises(
            CheckpointRestoreError, match=r"Checkpoint 9.*_METADATA.*\n.*no earlier"
        ):
            store.restore(abstract(state))


def test_an_empty_directory_starts_anew(tmp_path, state):
    with open_store(tmp_path) as store:
        assert store.latest_step() is None
        assert store.resume_step() is None
        with pytest.raises(CheckpointRestoreError, match="No checkpoint in"):
            store.restore(abstract(state))


def test_a_restore_step_that_does_not_exist_is_an_error_that_lists_those_that_do(tmp_path, state):
    with open_store(tmp_path) as store:
        store.save(4, state, {})
        store.save(8, state, {})
    with open_store(tmp_path, restore_step=6) as store:
        for call in [store.resume_step, lambda: store.restore(abstract(state))]:
            with pytest.raises(CheckpointRestoreError, match=r"no checkpoint 6 .*steps 4, 8\."):
                call()


def test_later_steps_than_restore_step_are_refused_until_moved_away(tmp_path, state):
    with open_store(tmp_path) as store:
        for step in [4, 8, 12]:
            store.save(step, state, {"step": step})
    with open_store(tmp_path, restore_step=4) as store:
        with pytest.raises(CheckpointRestoreError, match="also holds steps 8, 12") as raised:
            store.resume_step()
        command = next(line for line in str(raised.value).splitlines() if "mkdir" in line)
        assert store.restore(abstract(state), step=4)[1] == {"step": 4}, "a step that is asked for"
        assert os.system(command) == 0
        assert store.resume_step() == 4
        store.save(5, state, {})
        store.wait()
        assert store.steps() == [4, 5]
    assert sorted(os.listdir(tmp_path / "checkpoints.after_4")) == ["12", "8"]


def test_a_store_that_does_not_save_reads_any_step_that_is_asked_for(tmp_path, state):
    """But does not resume a run from an earlier one: its figures would overwrite later ones'."""
    with open_store(tmp_path) as store:
        store.save(4, state, {"step": 4})
        store.save(8, state, {"step": 8})
    with open_store(tmp_path, restore_step=4, save_interval=0) as store:
        assert store.restore(abstract(state), step=4)[1] == {"step": 4}
        with pytest.raises(CheckpointRestoreError, match="also holds step 8"):
            store.resume_step()


def test_saving_a_step_that_is_not_the_highest_is_refused(tmp_path, state):
    with open_store(tmp_path) as store:
        store.save(4, state, {})
        for step in [3, 4]:
            with pytest.raises(CheckpointSaveError, match="already holds step 4"):
                store.save(step, state, {})


def test_without_save_interval_nothing_is_created_and_nothing_saved(tmp_path, state):
    with open_store(tmp_path / "run", save_interval=0) as store:
        assert store.latest_step() is None
        with pytest.raises(CheckpointSaveError, match=r"checkpoint\.save_interval is 0"):
            store.save(1, state, {})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("run_dir", ["file", "file/below", "/proc/mxjax-run"])
def test_a_directory_that_cannot_be_written_is_named_when_the_store_opens(tmp_path, run_dir):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"Cannot write checkpoints to .*checkpoints: .*run_dir"
    ):
        CheckpointStore(tmp_path / run_dir, CheckpointConfig(save_interval=1))


def test_what_cannot_be_saved_is_named(tmp_path):
    with open_store(tmp_path) as store:
        with pytest.raises(CheckpointSaveError, match=r"leaf a\.1 is a float"):
            store.save(1, {"a": [jnp.zeros(2), 1.0]}, {})
        with pytest.raises(CheckpointSaveError, match="metadata is not JSON"):
            store.save(1, {"a": jnp.zeros(2)}, {"lr": float("nan")})
        with pytest.raises(ValueError, match=r"both named a\.b"):
            store.save(1, {"a": {"b": jnp.zeros(2)}, "a.b": jnp.zeros(2)}, {})
        assert store.steps() == []


def test_a_target_without_sharding_is_refused(tmp_path):
    with open_store(tmp_path) as store:
        store.save(1, {"a": jnp.zeros(2)}, {})
        store.wait()
        with pytest.raises(ValueError, match="a has no sharding"):
            store.restore({"a": jax.ShapeDtypeStruct((2,), jnp.float32)})


def test_a_large_stack_is_stored_layer_by_layer(tmp_path, monkeypatch):
    """And what has two dims in one piece."""
    monkeypatch.setattr("mxjax.ckpt.store._LARGE_BYTES", 64)
    state = {"stack": jnp.arange(96.0).reshape(4, 4, 6), "head": jnp.ones((16, 8))}
    with contextlib.closing(CheckpointStore(tmp_path, CheckpointConfig(save_interval=1))) as store:
        store.save(1, state, {})
        store.wait()
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        restored, _ = store.restore(target)
    np.testing.assert_array_equal(restored["stack"], state["stack"])
    (file,) = (tmp_path / "checkpoints/1/state/array_metadatas").iterdir()
    found = [entry["array_metadata"] for entry in json.loads(file.read_text())["array_metadatas"]]
    chunks = {entry["param_name"]: entry["chunk_shape"] for entry in found}
    assert chunks == {"stack": [1, 4, 6], "head": [16, 8]}
