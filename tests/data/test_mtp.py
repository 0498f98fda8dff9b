"""Inputs and targets of multi-token prediction, position by position."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mxjax.data.loader import BatchLoader
from mxjax.data.mtp import with_mtp
from mxjax.data.packing import PackedSamples
from mxjax.data.store import TokenStore

LENGTHS = [5, 1, 2, 9, 4, 16]
S = 8


def packed(document_mask):
    """Documents whose tokens are 100 * document + place."""
    starts = np.concatenate([[0], np.cumsum(LENGTHS)[:-1]])
    tokens = np.concatenate([100 * d + np.arange(n) for d, n in enumerate(LENGTHS)])
    store = TokenStore(tokens.astype(np.int32), starts, np.array(LENGTHS))
    return PackedSamples(store, S, document_mask=document_mask, shuffle_seed=None, num_epochs=1)


def test_every_module_sees_the_token_ahead_and_predicts_the_one_after_it():
    """Within a document and within the sample: token i + k is fed and token i + k + 1 wanted."""
    real = 0
    for sample in (packed(True)[i] for i in range(packed(True).num_samples)):
        ahead = with_mtp(sample, 3)
        assert all(np.array_equal(ahead[name], sample[name]) for name in sample)
        for k in (1, 2, 3):
            for i in range(S):
                document, place = divmod(int(sample["tokens"][i]), 100)
                fed, wanted = ahead[f"mtp_tokens_{k}"][i], ahead[f"mtp_targets_{k}"][i]
                in_document = place + k + 1 < LENGTHS[document] and sample["segment_ids"][i] > 0
                if not (in_document and i + k < S):
                    assert wanted == -1
                else:
                    assert fed == 100 * document + place + k
                    assert wanted == fed + 1
                    real += 1
    assert real > 20


def test_without_a_document_mask_it_looks_into_the_next_document():
    samples = packed(False)
    ahead = with_mtp(samples[0], 1)
    np.testing.assert_array_equal(ahead["mtp_tokens_1"], [*samples[0]["tokens"][1:], 0])
    np.testing.assert_array_equal(ahead["mtp_targets_1"], [*samples[0]["targets"][1:], -1])
    last = with_mtp(samples[samples.num_samples - 1], 1)
    assert np.all(last["mtp_targets_1"][samples.num_tokens % S - 2 :] == -1)


def test_a_target_that_does_not_count_is_still_fed():
    """A loss mask takes out targets, not the tokens that the model sees."""
    sample = packed(True)[2]
    masked = sample | {"targets": np.full_like(sample["targets"], -1)}
    ahead = with_mtp(masked, 1)
    np.testing.assert_array_equal(ahead["mtp_tokens_1"], with_mtp(sample, 1)["mtp_tokens_1"])
    assert np.all(ahead["mtp_targets_1"] == -1)


def test_batches_bring_them():
    """Also in the padding that fills up the last batch."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("dp",))
    samples = packed(True)
    loader = BatchLoader(
        samples,
        global_batch_size=4,
        num_microbatches=2,
        sharding=NamedSharding(mesh, PartitionSpec(None, "dp", None)),
        mtp_num_layers=2,
        pad_last_batch=True,
    )
    rows = [jax.tree.map(lambda a: np.asarray(a).reshape(4, S), batch) for batch in loader]
    loader.close()
    for index in range(samples.num_samples):
        row = {name: array[index % 4] for name, array in rows[index // 4].items()}
        want = with_mtp(samples[index], 2)
        assert row.keys() == want.keys()
        for name in want:
            np.testing.assert_array_equal(row[name], want[name])
    assert np.all(rows[-1]["mtp_targets_2"][samples.num_samples % 4 :] == -1)
