import numpy as np

from mxjax.data.random import Stream, random_permutation, random_words


def test_values_never_change():
    """A checkpoint's sample index is worth nothing if the order changes with a release of NumPy
    or of mxjax: these values were computed once and stay."""
    words = [11575813873326213013, 11610403562589542363, 1677039789095533711]
    assert random_words(3, 7, Stream.WINDOWS, 2).tolist() == words
    permutation = [2, 5, 1, 8, 6, 7, 0, 4, 3, 9]
    assert random_permutation(10, 0, Stream.DOCUMENTS, 1).tolist() == permutation


def test_seeds_streams_and_positions_differ():
    keys = [
        (0, Stream.WINDOWS, 0),
        (1, Stream.WINDOWS, 0),
        (0, Stream.DOCUMENTS, 0),
        (0, Stream.WINDOWS, 1),
        (2**64 + 1, Stream.WINDOWS, 0),
    ]
    orders = {tuple(random_permutation(20, *key)) for key in keys}
    assert len(orders) == len(keys)


def test_permutation_is_uniform():
    """Each value lands at each place equally often (chi-square with 24 degrees of freedom)."""
    counts = np.zeros((5, 5))
    for position in range(2000):
        counts[np.arange(5), random_permutation(5, 3, Stream.SPLIT, position)] += 1
    assert ((counts - 400) ** 2 / 400).sum() < 50
