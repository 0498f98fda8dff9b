import json
import os

import numpy as np
import pytest

from mxjax.config.schema import DataConfig
from mxjax.data.build import build_data
from mxjax.data.errors import DataError


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
    with pytest.raises(DataError, match=r"data\.paths: the 1 files hold no text"):
        build(tmp_path)


def test_validation_files_must_leave_some_to_train_on(corpus):
    with pytest.raises(DataError, match=r"data\.validation_paths: takes every file of data\.paths"):
        build(corpus, validation_paths=(f"{corpus}/*.txt",))


def test_a_validation_path_without_files_is_named_by_its_key(corpus):
    with pytest.raises(DataError, match=r"data\.validation_paths: no file matches"):
        build(corpus, validation_paths=("missing.txt",))
