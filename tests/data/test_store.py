import numpy as np
import pytest

from mxjax.data.errors import DataError
from mxjax.data.store import TokenStore, split, tokenize
from mxjax.data.tokenizer import ByteTokenizer


def documents_of(store):
    return [
        store.tokens[start : start + length].tolist()
        for start, length in zip(store.starts, store.lengths, strict=True)
    ]


def store_of(texts):
    return tokenize([(f"document {i}", text) for i, text in enumerate(texts)], ByteTokenizer())


def test_each_document_ends_with_the_end_of_document_token():
    store = store_of(["ab", b"\xff\x00", "c"])
    assert documents_of(store) == [[97, 98, 256], [255, 0, 256], [99, 256]]
    assert (store.num_documents, store.num_tokens) == (3, 8)


def test_empty_documents_are_skipped():
    assert documents_of(store_of(["", "a", "", "b", ""])) == [[97, 256], [98, 256]]


class LargeVocabulary(ByteTokenizer):
    vocab_size, eod_id = 100_001, 100_000

    def encode(self, text):
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64) + 70_000


def test_tokens_are_as_wide_as_the_vocabulary_needs():
    assert store_of(["a"]).tokens.dtype == np.uint16
    large = tokenize([("x", "a")], LargeVocabulary())
    assert large.tokens.dtype == np.int32
    assert large.tokens.tolist() == [70_097, 100_000]


class Utf8Tokenizer(ByteTokenizer):
    def encode(self, text):
        return super().encode(text.decode("utf-8"))


def test_a_document_that_the_tokenizer_cannot_read_is_named():
    with pytest.raises(DataError, match=r"corpus/a\.txt: not UTF-8 .*data\.exclude"):
        tokenize([("corpus/a.txt", b"ok \xff")], Utf8Tokenizer())


@pytest.mark.parametrize(
    ("num_documents", "fraction", "held_out"),
    [(100, 0.05, 5), (100, 0.001, 1), (2, 0.9, 1), (10, 0.99, 9), (3, 0.5, 2)],
)
def test_split_is_disjoint_and_exhaustive(num_documents, fraction, held_out):
    texts = [f"text {i}" for i in range(num_documents)]
    train, validation = (documents_of(part) for part in split(store_of(texts), fraction))
    assert len(validation) == held_out
    assert sorted(train + validation) == sorted(documents_of(store_of(texts)))


def test_split_takes_documents_from_everywhere():
    """Neighbouring files are alike, so the held-out ones must not be neighbours."""
    _, validation = split(store_of([str(i) for i in range(1000)]), 0.1)
    numbers = [int(bytes(d[:-1])) for d in documents_of(validation)]
    assert numbers == sorted(numbers)
    assert all(5 <= n <= 40 for n in np.histogram(numbers, 5, (0, 1000))[0])


def test_documents_added_at_the_end_hardly_move_the_split():
    texts = [f"text {i}" for i in range(1100)]
    old = {tuple(d) for d in documents_of(split(store_of(texts[:1000]), 0.1)[1])}
    new = {tuple(d) for d in documents_of(split(store_of(texts), 0.1)[1])}
    assert len(old & new) > 85


def test_of_a_single_document_the_tail_is_held_out():
    train, validation = split(store_of(["0123456789"]), 0.3)
    assert [bytes(d) for d in documents_of(train)] == [b"0123456"]
    assert documents_of(validation) == [[*b"789", 256]]


def test_a_single_short_document_cannot_be_split():
    with pytest.raises(
        DataError, match=r"data\.validation_fraction: .* 2 tokens.*validation_paths"
    ):
        split(store_of(["ab"]), 0.5)


def test_a_side_of_a_single_token_cannot_be_used():
    store = TokenStore(np.arange(5), np.array([0, 4]), np.array([4, 1]))
    with pytest.raises(
        DataError, match=r"data\.validation_fraction: 0\.5 of the 2 documents leaves"
    ):
        split(store, 0.5)


def test_fraction_zero_holds_out_nothing():
    store = store_of(["a", "b"])
    assert split(store, 0) == (store, None)


def test_a_store_can_be_a_memory_map(tmp_path):
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "x.bin")
    tokens = np.memmap(tmp_path / "x.bin", np.uint16, "r")
    store = TokenStore(tokens, np.array([0, 4]), np.array([4, 6]))
    assert documents_of(store.select(np.array([1]))) == [[4, 5, 6, 7, 8, 9]]
    assert np.shares_memory(store.select(np.array([1])).tokens, tokens)
