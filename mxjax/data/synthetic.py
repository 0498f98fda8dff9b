"""Random tokens: for benchmarks, and for trying out a model without data."""

import numpy as np

from mxjax.data.packing import Sample, fingerprint
from mxjax.data.random import Stream, random_words


class SyntheticSamples:
    """Endless samples of uniformly random tokens, one document each; see `Samples`.

    Args:
      seq_length: length of a sample.
      vocab_size: tokens are 0 .. vocab_size - 1, end-of-document included like any other.
      seed: of the tokens.
      stream: `SYNTHETIC_TRAIN` or `SYNTHETIC_VALIDATION`.
    """

    num_samples = None
    samples_per_epoch = None

    def __init__(self, seq_length: int, vocab_size: int, *, seed: int, stream: Stream):
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.seed = seed
        self.stream = stream
        self.fingerprint = fingerprint((seq_length, vocab_size, seed, stream.name))

    def epoch(self, index: int) -> int:
        return 0

    def describe(self) -> str:
        return f"endless random tokens below {self.vocab_size:,}"

    def __getitem__(self, index: int) -> Sample:
        words = random_words(self.seq_length + 1, self.seed, self.stream, index)
        tokens = (words % self.vocab_size).astype(np.int32)
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "segment_ids": np.ones(self.seq_length, np.int32),
            "positions": np.arange(self.seq_length, dtype=np.int32),
        }
