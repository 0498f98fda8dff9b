"""CheckpointStore after SIGKILL during a save."""

import multiprocessing
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.ckpt.store import CheckpointStore
from mxjax.config.schema import CheckpointConfig

# Its processes are forked from one that has imported what takes seconds.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["mxjax.ckpt.store"])


def write(folder: Path, said: Connection) -> None:
    """Saves step 1, says so when it is committed, starts to save step 2 and waits to be killed."""
    store = CheckpointStore(folder, CheckpointConfig(save_interval=1))
    store.save(1, make_state(1), {"step": 1})
    store.wait()
    state = make_state(2)
    said.send("committed 1")
    store.save(2, state, {"step": 2})
    said.send("saving 2")
    time.sleep(60)


def make_state(step: int) -> dict[str, jax.Array]:
    """32 MB that do not compress, so that writing them takes a while."""
    rng = np.random.default_rng(step)
    return {f"w{i}": jnp.asarray(rng.integers(0, 2**32, 2**21, np.uint32)) for i in range(4)}


def returned(_: Path) -> bool:
    return True


def data_being_written(checkpoints: Path) -> bool:
    data = checkpoints.glob("2.orbax-checkpoint-tmp*/state*/ocdbt.process_0/d/*")
    return any(data) or just_committed(checkpoints)


def just_committed(checkpoints: Path) -> bool:
    return (checkpoints / "2").exists()


@pytest.mark.parametrize(
    ("moment", "possible"),
    [(returned, {1, 2}), (data_being_written, {1, 2}), (just_committed, {2})],
)
def test_a_kill_during_a_save_leaves_the_previous_or_the_new_checkpoint(
    tmp_path: Path, moment: Callable[[Path], bool], possible: set[int]
):
    checkpoints = tmp_path / "checkpoints"
    heard, said = FORKED.Pipe()
    writer = FORKED.Process(target=write, args=(tmp_path, said))
    writer.start()
    try:
        for expected in ("committed 1", "saving 2"):
            assert heard.poll(60)
            assert heard.recv() == expected
        deadline = time.monotonic() + 30
        while not moment(checkpoints) and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        writer.kill()
        writer.join()

    with closing(CheckpointStore(tmp_path, CheckpointConfig(save_interval=1))) as store:
        latest = store.latest_step()
        assert latest in possible
        assert [entry.name for entry in checkpoints.glob("*tmp*")] == []
        assert_restores(store, latest)
        if latest == 1:
            store.save(2, make_state(2), {"step": 2})
            store.wait()
        assert store.latest_step() == 2
        assert_restores(store, 2)


def assert_restores(store: CheckpointStore, step: int) -> None:
    expected = make_state(step)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), expected
    )
    state, metadata = store.restore(target)
    assert metadata == {"step": step}
    for name, array in expected.items():
        assert np.array_equal(state[name], array)
