"""Random numbers as pure functions of (seed, stream, position), for ever the same.

Only raw words of a NumPy bit generator are used: NumPy guarantees their values across releases,
but not those of ``Generator.permutation`` or ``Generator.integers`` (NEP 19). An upgrade of NumPy
in the middle of a run must not change which samples are still to come.
"""

import enum

import numpy as np


class Stream(enum.IntEnum):
    """What random words are for. Distinct streams of one seed are independent."""

    DOCUMENTS = 0
    WINDOWS = 1
    SPLIT = 2
    SYNTHETIC_TRAIN = 3
    SYNTHETIC_VALIDATION = 4


def random_words(count: int, seed: int, stream: Stream, position: int = 0) -> np.ndarray:
    """`count` random words, uint64 [count], from the counter-based generator Philox."""
    sequence = np.random.SeedSequence(seed, spawn_key=(stream, position))
    return np.random.Philox(sequence).random_raw(count)


def random_permutation(count: int, seed: int, stream: Stream, position: int = 0) -> np.ndarray:
    """A random order of 0 .. count-1, int64 [count]."""
    return np.argsort(random_words(count, seed, stream, position), kind="stable")
