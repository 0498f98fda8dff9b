import os
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mxjax.config.schema import DataConfig
from mxjax.data.build import build_data
from mxjax.data.errors import DataError
from mxjax.data.indexed import IndexedWriter
from mxjax.data.loader import BatchLoader
from mxjax.data.packing import PackedSamples
from mxjax.data.store import TokenStore

SEQ_LENGTH = 4
ROWS_OVER_DP = P(None, "dp", None)


class NumberedSamples:
    """Sample i holds i in each token, and remembers who read it."""

    seq_length = SEQ_LENGTH
    samples_per_epoch = None

    def __init__(self, num_samples=None, broken=None):
        self.num_samples = num_samples
        self.broken = broken
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        if index == self.broken:
            raise OSError("disk on fire")
        values = np.full(SEQ_LENGTH, index, np.int32)
        return {
            "tokens": values,
            "targets": values + 1,
            "segment_ids": values * 0 + 1,
            "positions": np.arange(SEQ_LENGTH, dtype=np.int32),
        }


def sharding_of(spec=ROWS_OVER_DP, shape=(4, 2), axes=("dp", "tp")):
    devices = np.array(jax.devices("cpu")[: np.prod(shape)]).reshape(shape)
    return NamedSharding(jax.sharding.Mesh(devices, axes), spec)


def load(samples, batch_size=8, num_microbatches=1, sharding=None, **options):
    return BatchLoader(
        samples,
        global_batch_size=batch_size,
        num_microbatches=num_microbatches,
        sharding=sharding or sharding_of(),
        **options,
    )


def sample_numbers(batch):
    """Sample of each row of a batch of `NumberedSamples`, in order of microbatches."""
    return np.asarray(batch["tokens"])[:, :, 0].ravel().tolist()


def test_a_sequence_is_put_into_the_order_asked_for_before_it_is_split():
    order = np.array([0, 3, 1, 2])
    sharding = sharding_of(P(None, "dp", "cp"), axes=("dp", "cp"))
    batch = next(load(NumberedSamples(), sharding=sharding, sequence_order=order))
    assert np.asarray(batch["positions"])[0, 0].tolist() == order.tolist()
    second = next(s for s in batch["positions"].addressable_shards if s.index[2].start == 2)
    assert np.asarray(second.data)[0, 0].tolist() == [1, 2]


def test_rows_are_consecutive_samples():
    loader = load(NumberedSamples(), 8, 2, start=100)
    batch = next(loader)
    assert np.asarray(batch["tokens"])[:, :, 0].tolist() == [
        [100, 101, 102, 103],
        [104, 105, 106, 107],
    ]
    assert np.asarray(batch["targets"])[:, :, 0].tolist() == [
        [101, 102, 103, 104],
        [105, 106, 107, 108],
    ]
    assert np.asarray(batch["positions"])[0, 0].tolist() == [0, 1, 2, 3]
    assert sample_numbers(next(loader)) == list(range(108, 116))


@pytest.mark.parametrize(
    "spec",
    [
        P(None, "dp", None),
        P(None, ("dp", "tp"), None),
        P(None, "dp", "tp"),
        P(),
        P(None, "tp", "dp"),
    ],
)
def test_batches_are_global_arrays_with_the_given_sharding(spec):
    sharding = sharding_of(spec)
    batch = next(load(NumberedSamples(), 16, 2, sharding))
    expected = np.broadcast_to(np.arange(16).reshape(2, 8, 1), (2, 8, SEQ_LENGTH))
    for array in batch.values():
        assert (array.shape, array.dtype, array.sharding) == (
            (2, 8, SEQ_LENGTH),
            np.int32,
            sharding,
        )
    for shard in batch["tokens"].addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])


@pytest.mark.parametrize(
    "layouts", [[(4, 8, 1), (2, 4, 2), (1, 6, 3)], [(1, 1, 1), (4, 16, 2), (2, 2, 1)]]
)
def test_resuming_with_another_layout_goes_on_with_the_next_unseen_sample(layouts):
    """(data ranks, batch size, microbatches), three batches of each, over the end of an epoch."""
    lengths = np.array([5, 9, 2, 17, 30, 4])
    store = TokenStore(np.arange(67, dtype=np.uint16), np.cumsum(lengths) - lengths, lengths)

    def samples():
        return PackedSamples(store, SEQ_LENGTH, document_mask=True, shuffle_seed=5, num_epochs=None)

    seen, start = [], 0
    for dp, batch_size, num_microbatches in layouts:
        loader = load(
            samples(), batch_size, num_microbatches, sharding_of(shape=(dp, 2)), start=start
        )
        for _ in range(3):
            batch = {
                name: np.asarray(array).reshape(-1, SEQ_LENGTH)
                for name, array in next(loader).items()
            }
            seen += [
                {name: array[row] for name, array in batch.items()} for row in range(batch_size)
            ]
        start = loader.next_sample_index
        loader.close()
    assert start == len(seen) == 3 * sum(batch_size for _, batch_size, _ in layouts)
    assert start > samples().samples_per_epoch
    for i, sample in enumerate(seen):
        for name, array in samples()[i].items():
            np.testing.assert_array_equal(sample[name], array)


def test_the_state_counts_batches_handed_out_not_those_read_ahead():
    samples = NumberedSamples()
    loader = load(samples, 8, prefetch=4, start=3)
    assert loader.next_sample_index == 3
    next(loader)
    wait_until(lambda: len(samples.read) >= 5 * 8)
    assert loader.next_sample_index == 11
    loader.close()
    assert sample_numbers(next(load(NumberedSamples(), start=loader.next_sample_index))) == list(
        range(11, 19)
    )


def test_reading_ahead_is_bounded():
    samples = NumberedSamples()
    loader = load(samples, 8, prefetch=2)
    next(loader)
    time.sleep(0.2)
    assert len(samples.read) == 3 * 8
    loader.close()


def test_iteration_ends_when_less_than_a_batch_is_left():
    loader = load(NumberedSamples(num_samples=27), 8, start=2)
    assert [sample_numbers(batch)[0] for batch in loader] == [2, 10, 18]
    assert loader.next_sample_index == 26
    with pytest.raises(StopIteration):
        next(loader)


@pytest.mark.parametrize("start", [20, 27, 30])
def test_iteration_may_start_at_the_end(start):
    assert list(load(NumberedSamples(num_samples=27), 8, start=start)) == []


def test_an_evaluation_pads_its_last_batch():
    batches = list(load(NumberedSamples(num_samples=11), 8, 2, pad_last_batch=True))
    assert [len(b["tokens"].ravel()) for b in batches] == [32, 32]
    segments = np.asarray(batches[1]["segment_ids"]).reshape(8, SEQ_LENGTH)
    assert segments[:3].all()
    assert not segments[3:].any()
    assert (np.asarray(batches[1]["targets"]).reshape(8, SEQ_LENGTH)[3:] == -1).all()


def test_a_reader_s_exception_is_raised_with_its_sample_and_cause():
    loader = load(NumberedSamples(broken=19), 8)
    batches = [next(loader), next(loader)]
    with pytest.raises(RuntimeError, match="reading sample 19 failed: disk on fire") as caught:
        next(loader)
    assert isinstance(caught.value.__cause__, OSError)
    assert loader.next_sample_index == 8 * len(batches)
    with pytest.raises(ValueError, match="closed"):  # rather than going on behind the lost batch
        next(loader)


def test_bad_data_keep_their_own_message():
    class Bad(NumberedSamples):
        def __getitem__(self, index):
            raise DataError("val.bin: holds the id 387")

    with pytest.raises(DataError, match=r"^val\.bin: holds the id 387"):
        next(load(Bad()))


def test_a_reader_cannot_end_the_data_by_accident():
    class Exhausted(NumberedSamples):
        def __getitem__(self, index):
            raise StopIteration

    with pytest.raises(RuntimeError, match="reading sample 0 failed"):
        next(load(Exhausted()))


def test_closing_ends_the_reader_threads():
    before = set(threading.enumerate())
    loader = load(NumberedSamples(), num_threads=3, prefetch=5)
    next(loader)
    assert len(set(threading.enumerate()) - before) > 0
    loader.close()
    loader.close()
    wait_until(lambda: not set(threading.enumerate()) - before)


def test_microbatches_must_divide_the_batch():
    with pytest.raises(ValueError, match=r"training\.global_batch_size: 8 .*num_microbatches = 3"):
        load(NumberedSamples(), 8, 3)


PROCESS = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.distributed.initialize(sys.argv[2], num_processes=2, process_id=int(sys.argv[1]))
from mxjax.data.loader import BatchLoader
from test_loader import NumberedSamples
sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 1), ("dp", "tp")), P(None, "dp"))
samples = NumberedSamples(num_samples=16)
(batch,) = BatchLoader(samples, global_batch_size=16, num_microbatches=2, sharding=sharding)
for shard in batch["tokens"].addressable_shards:
    expected = np.arange(16).reshape(2, 8)[shard.index[:2]]
    np.testing.assert_array_equal(np.asarray(shard.data)[:, :, 0], expected)
print("read", sorted(samples.read))
"""


def test_each_process_reads_only_the_rows_of_its_devices():
    """Two processes of two devices; each microbatch of 8 rows is cut in four."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.path.dirname(__file__),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), address],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert "read [0, 1, 2, 3, 8, 9, 10, 11]" in outputs[0], outputs[0]
    assert "read [4, 5, 6, 7, 12, 13, 14, 15]" in outputs[1], outputs[1]


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "layouts", [[(4, 8, 1), (2, 4, 2), (1, 6, 3)], [(1, 1, 1), (4, 16, 2), (2, 2, 1)]]
)
def test_resuming_in_mid_blend_with_another_layout_goes_on_with_the_next_sample(tmp_path, layouts):
    """Sources on disk, unequal weights; the smaller one begins another pass on the way."""
    for name, first, lengths in (("a", 0, [9, 30, 4, 21]), ("b", 500, [60, 3, 44, 90, 8])):
        with IndexedWriter(str(tmp_path / name), np.dtype("uint16")) as writer:
            for length in lengths:
                writer.add_document(np.arange(first, first := first + length))
    config = DataConfig(
        source="indexed",
        blend=((0.6, str(tmp_path / "a")), (0.4, str(tmp_path / "b"))),
        validation_fraction=0.0,
    )

    def samples():
        return build_data(config, SEQ_LENGTH, 1000, seed=5).train

    seen, start = [], 0
    for dp, batch_size, num_microbatches in layouts:
        sharding = sharding_of(shape=(dp, 2))
        loader = load(samples(), batch_size, num_microbatches, sharding, start=start)
        for _ in range(3):
            seen += np.asarray(next(loader)["tokens"]).reshape(-1, SEQ_LENGTH).tolist()
        start = loader.next_sample_index
        loader.close()
    whole = samples()
    assert seen == [whole[i]["tokens"].tolist() for i in range(start)]
    from_first = [tokens[0] < 500 for tokens in seen]
    assert abs(sum(from_first) - 0.6 * start) < 1
    assert max(whole.epoch(i) for i in range(start)) >= 1
