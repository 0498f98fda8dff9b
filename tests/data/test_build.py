import json
import os

import numpy as np
import pytest

from mxjax.config.schema import DataConfig
from mxjax.data.build import build_data
from mxjax.data.errors import DataError
from mxjax.data.indexed import IndexedWriter
from mxjax.data.preprocess import Encoding, preprocess
from mxjax.data.tokenizer import load_tokenizer


@pytest.fixture
def corpus(tmp_path):
    """40 files, each of one letter repeated, so that a token tells its document."""
    for i in range(40):
        (tmp_path / f"{i:02d}.txt").write_text(chr(ord("0") + i) * (20 + i))
    return tmp_path


def build(corpus, seed=0, **settings):
    config = DataConfig(**{"source": "text", "paths": (str(corpus),), **settings})
    return build_data(config, 16, 320, seed)


def epoch_tokens(samples):
    return np.concatenate([samples[i]["tokens"] for i in range(samples.samples_per_epoch)])


def letters(samples):
    return set(epoch_tokens(samples).tolist()) - {0, 256}


def test_training_and_validation_share_no_document(corpus):
    data = build(corpus, validation_fraction=0.25)
    assert len(letters(data.validation)) == 10
    assert len(letters(data.train)) == 30
    assert not letters(data.train) & letters(data.validation)


def test_the_split_does_not_depend_on_the_seed(corpus):
    first, second = build(corpus, seed=1), build(corpus, seed=2)
    assert first.validation.fingerprint == second.validation.fingerprint
    assert letters(first.train) == letters(second.train)
    assert first.train.fingerprint != second.train.fingerprint


def test_validation_is_one_pass_in_an_order_of_its_own(corpus):
    """The first few batches are a sample of all held-out text, the same whatever the seed."""
    first, second = (build(corpus, validation_fraction=0.25, seed=s).validation for s in (1, 2))
    assert first.num_samples == first.samples_per_epoch
    tokens = [t for t in epoch_tokens(first).tolist() if t not in (0, 256)]
    assert tokens != sorted(tokens)
    assert epoch_tokens(first).tolist() == epoch_tokens(second).tolist()


def test_validation_without_shuffling_is_in_file_order(corpus):
    validation = build(corpus, validation_fraction=0.25, shuffle=False).validation
    tokens = [t for t in epoch_tokens(validation).tolist() if t not in (0, 256)]
    assert tokens == sorted(tokens)


def test_validation_files_are_never_trained_on(corpus):
    os.symlink("05.txt", corpus / "alias.txt")
    data = build(corpus, validation_paths=(str(corpus / "0?.txt"),))
    assert letters(data.validation) == set(range(48, 58))
    assert letters(data.train) == set(range(58, 88))


def test_documents_without_anything_to_predict_are_refused(tmp_path):
    with IndexedWriter(str(tmp_path / "one"), np.dtype(np.uint16)) as writer:
        for _ in range(50):
            writer.add_document(np.array([3]))
    settings = {"source": "indexed", "paths": (str(tmp_path / "one"),), "validation_fraction": 0.0}
    with pytest.raises(DataError, match="every document is a single token"):
        build(tmp_path, **settings)
    assert build(tmp_path, document_mask=False, **settings).train.num_tokens == 50


def test_without_held_out_documents_there_is_no_validation(corpus):
    data = build(corpus, validation_fraction=0.0)
    assert data.validation is None
    assert len(letters(data.train)) == 40


def test_jsonl_holds_the_same_documents_as_text_files(corpus):
    lines = [json.dumps({"body": path.read_text()}) for path in sorted(corpus.glob("*.txt"))]
    (corpus / "all.jsonl").write_text("\n".join(lines))
    text = build(corpus, exclude=("*.jsonl",))
    jsonl = build(corpus, source="jsonl", text_key="body")
    assert jsonl.train.fingerprint == text.train.fingerprint
    assert jsonl.validation.fingerprint == text.validation.fingerprint


def test_settings_reach_the_samples(corpus):
    in_order = build(
        corpus, shuffle=False, num_epochs=2, document_mask=False, validation_fraction=0.0
    ).train
    assert in_order.num_samples == 2 * in_order.samples_per_epoch
    assert set(in_order[2]["segment_ids"].tolist()) == {1}
    assert chr(in_order[0]["tokens"][0]) == "0"
    assert build(corpus).train.num_samples is None


def test_description_counts_documents_tokens_and_samples(tmp_path):
    (tmp_path / "a").write_text("x" * 999)
    (tmp_path / "b").write_text("y" * 999)
    train = build(tmp_path, validation_fraction=0.0).train
    assert train.describe() == "2 documents, 2,000 tokens, 125 samples per epoch"


def test_synthetic_training_and_validation_differ():
    data = build_data(DataConfig(source="synthetic"), 16, 100, 0)
    assert data.train[0]["tokens"].tolist() != data.validation[0]["tokens"].tolist()
    assert max(data.train[i]["tokens"].max() for i in range(200)) == 99


def test_the_tokenizer_reads_what_the_samples_hold(corpus):
    data = build(corpus, shuffle=False, validation_fraction=0.0)
    assert data.tokenizer.decode(data.train[0]["tokens"]) == "0" * 16


def test_files_without_text_are_an_error(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"data\.paths: the files hold no text"):
        build(tmp_path)


def test_validation_files_must_leave_some_to_train_on(corpus):
    with pytest.raises(DataError, match=r"data\.validation_paths: takes every file of data\.paths"):
        build(corpus, validation_paths=(f"{corpus}/*.txt",))


def test_a_validation_path_without_files_is_named_by_its_key(corpus):
    with pytest.raises(DataError, match=r"data\.validation_paths: no file matches"):
        build(corpus, validation_paths=("missing.txt",))


def as_indexed(corpus, pattern, prefix):
    """Files of the corpus as an indexed dataset, in the order of their names."""
    with IndexedWriter(str(prefix), np.dtype("uint16")) as writer:
        for path in sorted(corpus.glob(pattern)):
            writer.add_document(np.frombuffer(path.read_bytes() + b"\0", np.uint8))
    return str(prefix)


def test_an_indexed_dataset_gives_the_samples_of_the_same_text(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexed")
    encoding = Encoding("text", "text", "byte", None, append_eod=True)
    preprocess(sorted(map(str, corpus.glob("*.txt"))), encoding, str(folder / "x"))
    text = build(corpus, seed=3, validation_fraction=0.2, num_epochs=2)
    tokens = build(folder, seed=3, source="indexed", validation_fraction=0.2, num_epochs=2)
    for first, second in ((text.train, tokens.train), (text.validation, tokens.validation)):
        assert first.num_samples == second.num_samples > 10
        for i in range(first.num_samples):
            for name, values in first[i].items():
                np.testing.assert_array_equal(second[i][name], values)


@pytest.fixture(params=["text", "jsonl", "indexed"])
def blended(corpus, tmp_path_factory, request):
    """(source, paths of two sources of 10 and 30 documents that share no letter)."""
    folder = tmp_path_factory.mktemp("sources")
    paths = []
    for name, pattern in (("small", "0?.txt"), ("large", "[1-3]?.txt")):
        if request.param == "text":
            paths.append(str(corpus / pattern))
        elif request.param == "indexed":
            paths.append(as_indexed(corpus, pattern, folder / name))
        else:
            lines = [json.dumps({"text": p.read_text()}) for p in sorted(corpus.glob(pattern))]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
            paths.append(str(folder / f"{name}.jsonl"))
    return request.param, paths


SMALL = set(range(ord("0"), ord("0") + 10))


def test_a_blend_gives_the_stated_proportions_for_every_kind_of_source(corpus, blended):
    """Three quarters from the source that has less text; no held-out document is trained on."""
    source, (small, large) = blended
    data = build(corpus, source=source, paths=(), blend=((0.75, small), (0.25, large)))
    for samples, count in ((data.train, 400), (data.validation, 4)):
        found = [set(samples[i]["tokens"].tolist()) - {0, 256} for i in range(count)]
        from_small = [letters <= SMALL for letters in found]
        assert not any(letters & SMALL and letters - SMALL for letters in found)
        assert sum(from_small) == 0.75 * count
    assert data.train.num_samples is None
    held_out = {t for i in range(4) for t in data.validation[i]["tokens"].tolist()} - {0, 256}
    trained = {t for i in range(400) for t in data.train[i]["tokens"].tolist()}
    assert not held_out & trained


def test_a_blend_ends_with_its_first_or_last_source(corpus, blended):
    source, (small, large) = blended
    settings = {"source": source, "paths": (), "blend": ((1, small), (1, large)), "num_epochs": 2}
    first = build(corpus, **settings).train
    last = build(corpus, **settings, blend_stop="all_exhausted").train
    per_epoch = [samples.samples_per_epoch for samples in first.sources]
    assert first.num_samples == 2 * 2 * min(per_epoch)
    assert last.num_samples == 2 * 2 * max(per_epoch)
    assert first.fingerprint == last.fingerprint


def test_a_blend_evaluates_on_validation_files(corpus):
    data = build(
        corpus,
        paths=(),
        blend=((1, f"{corpus}/[0-2]?.txt"), (2, f"{corpus}/3?.txt")),
        validation_paths=(f"{corpus}/?5.txt",),
    )
    assert letters(data.validation) == {ord("0") + n for n in (5, 15, 25, 35)}
    trained = {t for i in range(500) for t in data.train[i]["tokens"].tolist()} - {0, 256}
    assert trained == {ord("0") + n for n in range(40) if n % 10 != 5}


def test_a_file_in_two_sources_of_a_blend_is_an_error(corpus):
    with pytest.raises(DataError, match=r"data\.blend \(.*\?5\.txt\): .*05\.txt is in data\.blend"):
        build(corpus, paths=(), blend=((1, f"{corpus}/0?.txt"), (1, f"{corpus}/?5.txt")))


def test_a_source_of_a_blend_without_files_is_named(corpus):
    with pytest.raises(DataError, match=r"data\.blend: no file matches 'missing'"):
        build(corpus, paths=(), blend=((1, f"{corpus}/0?.txt"), (1, "missing")))


def test_a_tokenizer_file_makes_the_tokens(corpus, tokenizer_file):
    settings = {"tokenizer": tokenizer_file, "eod_token": "<|endoftext|>", "shuffle": False}
    data = build(corpus, validation_fraction=0.0, **settings)
    assert data.tokenizer.decode(data.train[0]["tokens"]).startswith("0" * 16)
    ends = {samples["tokens"].tolist().count(0) for samples in map(data.train.__getitem__, (1, 2))}
    assert 1 in ends  # the id of <|endoftext|>


def test_a_vocabulary_smaller_than_the_tokenizer_is_an_error(corpus, tokenizer_file):
    settings = {"tokenizer": tokenizer_file, "eod_token": "<|endoftext|>"}
    config = DataConfig(source="text", paths=(str(corpus),), **settings)
    size = load_tokenizer(tokenizer_file, "<|endoftext|>").vocab_size
    build_data(config, 16, size, 0)
    with pytest.raises(DataError, match=rf"model\.vocab_size: {size - 1} does not hold the {size}"):
        build_data(config, 16, size - 1, 0)


def test_a_corpus_of_one_token_is_an_error(tmp_path):
    with IndexedWriter(str(tmp_path / "x"), np.dtype("uint16")) as writer:
        writer.add_document(np.array([7]))
    with pytest.raises(DataError, match=r"data\.paths: the files hold a single token"):
        build(tmp_path, source="indexed")
