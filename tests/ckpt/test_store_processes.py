"""CheckpointStore in two processes of two devices each."""

import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mxjax.ckpt.store import CheckpointStore
from mxjax.config.schema import CheckpointConfig

# Saves steps 1 to 3 on one mesh and reads step 3 back on another; keep_last drops step 1.
# Then process 1 alone cannot write its part of step 4.
WORKER = """
import os, resource, sys, time
import jax
import numpy as np

run_dir, address, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(address, num_processes=2, process_id=index)

from jax.sharding import PartitionSpec as P
from mxjax.ckpt.store import CheckpointRestoreError, CheckpointSaveError, CheckpointStore
from mxjax.config.schema import CheckpointConfig
from test_store_processes import SHAPE, place, values

assert jax.device_count() == 4 and jax.local_device_count() == 2
store = CheckpointStore(run_dir, CheckpointConfig(save_interval=1, keep_last=2))
assert store.latest_step() is None
for step in (1, 2, 3):
    state = {"w": place(values(step), P("dp", "tp")), "step": place(np.int32(step), P())}
    store.save(step, state, {"next_sample_index": 100 * step})
    store.check()
store.wait()
assert store.steps() == [2, 3], store.steps()

moved = {"w": place(values(0), P(None, ("tp", "dp"))), "step": place(np.int32(0), P())}
target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), moved)
restored, metadata = store.restore(target)
assert metadata == {"next_sample_index": 300}
assert int(restored["step"]) == 3
assert restored["w"].sharding == moved["w"].sharding
for shard in restored["w"].addressable_shards:
    assert np.array_equal(shard.data, values(3)[shard.index])

try:
    store.restore({"w": jax.ShapeDtypeStruct(SHAPE, np.float16, sharding=moved["w"].sharding)})
except CheckpointRestoreError as error:
    assert "step: not expected" in str(error)
store.close()
print("restored", flush=True)

store = CheckpointStore(run_dir, CheckpointConfig(save_interval=1))
if index == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
store.save(4, state, {})
try:
    while True:
        store.check()
        time.sleep(0.01)
except CheckpointSaveError as error:
    print(error, flush=True)
    os._exit(3)
"""

SHAPE = (16, 32)


def values(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 2**32, SHAPE, np.uint32)


def place(array: np.ndarray, spec: P) -> jax.Array:
    """`array`, known to each process, as one global array on the first four devices."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def test_two_processes_save_one_checkpoint_and_the_one_that_cannot_write_says_so_at_once(
    tmp_path: Path,
):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), address, str(index)],
            cwd=Path(__file__).parent,
            env={key: value for key, value in os.environ.items() if key != "XLA_FLAGS"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        out, err = workers[1].communicate(timeout=240)
        assert workers[1].returncode == 3, err
        assert "restored\nCheckpoint 4 was not saved to" in out
        assert "File too large" in out
        # Process 0 waits for process 1 until JAX finds that it is gone.
        workers[0].kill()
        assert "restored\n" in workers[0].communicate()[0]
    finally:
        for worker in workers:
            worker.kill()

    target = {"w": place(values(0), P("tp")), "step": place(np.int32(0), P())}
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target
    )
    with closing(CheckpointStore(tmp_path, CheckpointConfig())) as store:
        assert store.steps() == [2, 3]
        restored, metadata = store.restore(target)
    assert metadata == {"next_sample_index": 300}
    assert np.array_equal(restored["w"], values(3))
