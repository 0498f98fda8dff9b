import time
from fractions import Fraction

import numpy as np
import pytest

from mxjax.data.blend import LONGEST_PERIOD, BlendedSamples, quota_order, whole_parts
from mxjax.data.errors import DataError
from mxjax.data.packing import PackedSamples
from mxjax.data.store import TokenStore


def source_of(num_samples, first_token=0, shuffle_seed=0):
    """Samples of two tokens, in which a token tells source and place."""
    count = 2 * num_samples + 1
    tokens = np.arange(first_token, first_token + count, dtype=np.int32)
    store = TokenStore(tokens, np.array([0]), np.array([count]))
    return PackedSamples(store, 2, document_mask=True, shuffle_seed=shuffle_seed, num_epochs=None)


def blend(weights, sizes, num_epochs=None, **options):
    sources = [source_of(size, 1000 * d) for d, size in enumerate(sizes)]
    return BlendedSamples(sources, weights, num_epochs=num_epochs, **options)


def first_token(sample):
    return int(sample["tokens"][0])


@pytest.mark.parametrize(
    "weights",
    [
        [0.7, 0.3],
        [1, 2],
        [0.5, 0.25, 0.15, 0.1],
        [336, 2, 2, 1, 5, 2, 2],
        [1.0] * 7,
        [0.001, 0.999],
        np.random.default_rng(0).integers(1, 100, 40).tolist(),
        np.random.default_rng(1).dirichlet(np.ones(9)).round(4).tolist(),
    ],
)
def test_every_prefix_keeps_the_proportions_within_one_sample(weights):
    weights = [weight or 0.0001 for weight in weights]
    samples = blend(weights, [10] * len(weights))
    period = sum(samples.parts)
    count = min(2 * period + 5, 30_000)
    sources = np.array([samples.locate(i)[0] for i in range(count)])
    exact = [Fraction(str(weight)) for weight in weights]
    for d, weight in enumerate(exact):
        given = np.cumsum(sources == d)
        share = weight / sum(exact)
        due = np.arange(1, count + 1) * share.numerator  # in units of 1 / denominator
        assert np.all(abs(given * share.denominator - due) < share.denominator)


def test_two_sources_alternate_by_their_weights():
    samples = blend([0.75, 0.25], [10, 10])
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (0, 4), (0, 5), (1, 1)]
    assert [samples.locate(i) for i in range(8)] == order


def test_each_source_gives_its_own_samples_in_its_own_order():
    samples = blend([5, 2, 3], [11, 7, 30])
    for d in range(3):
        own = [i for i in range(500) if samples.locate(i)[0] == d]
        assert [samples.locate(i)[1] for i in own] == list(range(len(own)))
        alone = source_of([11, 7, 30][d], 1000 * d)
        assert [first_token(samples[i]) for i in own] == [
            first_token(alone[j]) for j in range(len(own))
        ]
        assert samples.epoch(own[-1]) == alone.epoch(len(own) - 1) > 1


def test_weights_are_proportions():
    assert whole_parts([0.7, 0.3]) == whole_parts([7, 3]) == whole_parts([1.4, 0.6]) == [7, 3]
    assert whole_parts([1, 2]) == [1, 2]
    assert whole_parts([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert whole_parts([1e-05, 0.99999]) == [1, 99999]


def test_awkward_weights_are_rounded_to_millionths_of_their_sum():
    weights = [0.123456789, 0.2, 3.1415926535]
    parts = whole_parts(weights)
    shares = np.array(weights) / sum(weights)
    assert sum(parts) * (LONGEST_PERIOD // sum(parts)) == LONGEST_PERIOD
    assert np.all(abs(np.array(parts) / sum(parts) - shares) <= 1e-6)


def test_a_weight_that_would_vanish_is_refused():
    with pytest.raises(DataError, match=r"data\.blend: the weight 1e-09 is less than .*raise it"):
        whole_parts([1e-9, 0.3, 0.7])


def test_any_sample_is_found_without_counting_up_to_it():
    samples = blend([5, 2, 3], [11, 7, 30])
    start = time.perf_counter()
    far = 10**15 + 7
    source, own = samples.locate(far)
    assert own == 10**14 * samples.parts[source] + samples.locate(7)[1]
    assert time.perf_counter() - start < 1


def test_the_order_of_the_longest_period_is_made_in_seconds():
    start = time.perf_counter()
    order = quota_order([333_333, 666_667])
    assert np.bincount(order).tolist() == [333_333, 666_667]
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [1, 9], [0.37, 0.63]])
@pytest.mark.parametrize("num_epochs", [1, 3])
def test_the_end_of_the_first_source_is_the_end(weights, num_epochs):
    sizes = [11, 7]
    samples = blend(weights, sizes, num_epochs)
    given = np.bincount([samples.locate(i)[0] for i in range(samples.num_samples)], minlength=2)
    limits = num_epochs * np.array(sizes)
    assert np.all(given <= limits)
    source, own = samples.locate(samples.num_samples)  # the first that there is not
    assert own == given[source] == limits[source]


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [1, 9], [0.37, 0.63]])
@pytest.mark.parametrize("num_epochs", [1, 3])
def test_the_end_of_the_last_source_is_the_end_if_asked_for(weights, num_epochs):
    sizes = [11, 7]
    samples = blend(weights, sizes, num_epochs, stop="all_exhausted")
    given = np.bincount([samples.locate(i)[0] for i in range(samples.num_samples)], minlength=2)
    limits = num_epochs * np.array(sizes)
    assert np.all(given >= limits)
    source, own = samples.locate(samples.num_samples - 1)  # the last one completes its source
    assert own + 1 == limits[source]


def test_without_epochs_sources_repeat_for_ever():
    samples = blend([1, 1], [3, 200])
    assert samples.num_samples is None
    tokens = [first_token(samples[i]) for i in range(24) if samples.locate(i)[0] == 0]
    passes = [sorted(tokens[i : i + 3]) for i in range(0, 12, 3)]
    assert passes == [[0, 2, 4]] * 4


@pytest.mark.parametrize("index", [-1, 14])
def test_samples_outside_of_the_run_are_an_error(index):
    samples = blend([1, 1], [7, 9], num_epochs=1)
    assert samples.num_samples == 14
    with pytest.raises(IndexError, match=rf"no sample {index}: .* from 0 to 13"):
        samples[index]


def test_the_fingerprint_tells_weights_sources_and_their_order_apart():
    variants = [
        blend([1, 2], [5, 6]),
        blend([2, 1], [5, 6]),
        blend([1, 2], [5, 7]),
        BlendedSamples([source_of(6, 1000), source_of(5)], [1, 2], num_epochs=None),
    ]
    assert len({samples.fingerprint for samples in variants}) == len(variants)
    same = blend([0.5, 1.0], [5, 6], num_epochs=2)
    assert same.fingerprint == variants[0].fingerprint


def test_the_description_names_shares_and_sources():
    assert blend([3, 1], [2, 4]).describe() == (
        "75% of 1 documents, 5 tokens, 2 samples per epoch; "
        "25% of 1 documents, 9 tokens, 4 samples per epoch"
    )
