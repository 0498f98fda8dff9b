import numpy as np

from mxjax.data.random import Stream
from mxjax.data.synthetic import SyntheticSamples


def synthetic(seed=0, stream=Stream.SYNTHETIC_TRAIN, vocab_size=1000, seq_length=512):
    return SyntheticSamples(seq_length, vocab_size, seed=seed, stream=stream)


def test_a_sample_depends_on_its_index_alone():
    forward, backward = synthetic(), synthetic()
    samples = [forward[i] for i in range(5)]
    for i in reversed(range(5)):
        for name, array in backward[i].items():
            np.testing.assert_array_equal(array, samples[i][name])


def test_samples_seeds_and_streams_differ():
    samples = [
        synthetic()[0],
        synthetic()[1],
        synthetic(seed=1)[0],
        synthetic(stream=Stream.SYNTHETIC_VALIDATION)[0],
    ]
    assert len({sample["tokens"].tobytes() for sample in samples}) == 4


def test_a_sample_is_one_document_without_padding():
    sample = synthetic()[3]
    np.testing.assert_array_equal(sample["tokens"][1:], sample["targets"][:-1])
    np.testing.assert_array_equal(sample["segment_ids"], 1)
    np.testing.assert_array_equal(sample["positions"], np.arange(512))
    assert {array.dtype for array in sample.values()} == {np.dtype(np.int32)}


def test_tokens_fill_the_vocabulary_evenly():
    counts = np.bincount(
        np.concatenate([synthetic(vocab_size=10)[i]["tokens"] for i in range(100)])
    )
    assert len(counts) == 10
    np.testing.assert_allclose(counts, 5120, atol=5 * 5120**0.5)


def test_samples_have_no_end():
    samples = synthetic()
    assert samples.num_samples is None
    assert samples.samples_per_epoch is None
    assert samples[10**15]["tokens"].shape == (512,)


def test_fingerprints_differ_with_the_tokens():
    variants = [
        synthetic(),
        synthetic(seed=1),
        synthetic(stream=Stream.SYNTHETIC_VALIDATION),
        synthetic(vocab_size=9),
        synthetic(seq_length=8),
    ]
    assert len({s.fingerprint for s in variants}) == 5
