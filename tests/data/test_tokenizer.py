import re
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer

from mxjax.data.errors import DataError
from mxjax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer

EOD = "<|endoftext|>"


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 世界 🙂\n", "half a pair: \ud83d"])
def test_text_survives_the_round_trip(text):
    ids = ByteTokenizer().encode(text)
    assert ids.tolist() == list(text.encode("utf-8", "surrogatepass"))
    if "\ud83d" not in text:
        assert ByteTokenizer().decode(ids) == text


def test_any_bytes_can_be_encoded():
    assert ByteTokenizer().encode(bytes(range(256))).tolist() == list(range(256))


def test_decoding_leaves_out_what_is_not_text():
    """A model may produce the end of a document, ids of vocabulary padding, or half a character."""
    assert (
        ByteTokenizer().decode(np.array([104, 105, 256, 319, 0xC3]))
        == "hi\N{REPLACEMENT CHARACTER}"
    )


@pytest.mark.parametrize(
    "text", ["", "the quick fox", "Grüße, 世界 🙂\n\n  x", f"the {EOD} of text", "<s> </s>"]
)
def test_a_tokenizer_file_encodes_and_decodes(tokenizer_file, text):
    tokenizer = HuggingFaceTokenizer(tokenizer_file, EOD)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.tolist() == tokenizer.encode(text.encode()).tolist()
    assert tokenizer.eod_id not in ids
    assert not len(ids) or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size


def test_a_tokenizer_file_agrees_with_its_package(tokenizer_file):
    """Without the truncation and padding that the file asks for."""
    reference = Tokenizer.from_file(tokenizer_file)
    assert len(reference.encode("the quick brown fox jumps").ids) == 64
    reference.no_truncation()
    reference.no_padding()
    tokenizer = HuggingFaceTokenizer(tokenizer_file, EOD)
    text = "the quick brown fox jumps over it"
    assert tokenizer.encode(text).tolist() == reference.encode(text).ids
    assert len(tokenizer.encode(text)) < len(text)  # it does merge letters
    assert tokenizer.eod_id == reference.token_to_id(EOD)
    assert tokenizer.vocab_size == max(reference.get_vocab().values()) + 1


def test_a_tokenizer_file_decodes_without_what_is_not_text(tokenizer_file):
    tokenizer = HuggingFaceTokenizer(tokenizer_file, EOD)
    ids = [*tokenizer.encode("the fox"), tokenizer.eod_id, 10_000]
    assert tokenizer.decode(np.array(ids)) == "the fox"


@pytest.mark.parametrize("text", ["half a pair: \ud83d", b"\xff"])
def test_a_tokenizer_file_takes_unicode_only(tokenizer_file, text):
    with pytest.raises(UnicodeError):
        HuggingFaceTokenizer(tokenizer_file, EOD).encode(text)


@pytest.mark.parametrize(
    ("eod_token", "words"),
    [
        ("</s>", rf"data\.eod_token: '</s>' is no token of .*special tokens: '{re.escape(EOD)}'"),
        ("<ordinary>", r"data\.eod_token: '<ordinary>' is an ordinary token"),
        ("the", r"data\.eod_token: 'the' is an ordinary token"),
    ],
)
def test_the_end_of_a_document_is_a_special_token(tokenizer_file, eod_token, words):
    with pytest.raises(DataError, match=words):
        load_tokenizer(tokenizer_file, eod_token)


def test_a_tokenizer_file_needs_an_end_of_document(tokenizer_file):
    with pytest.raises(DataError, match=r"data\.eod_token: name the token"):
        load_tokenizer(tokenizer_file, None)


def test_a_missing_tokenizer_file_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"data\.tokenizer: no file 'x\.json' .*{tmp_path}"):
        load_tokenizer("x.json", EOD)


def test_a_damaged_tokenizer_file_is_named(tmp_path):
    (tmp_path / "x.json").write_text('{"model": 7}')
    with pytest.raises(DataError, match=r"data\.tokenizer: .*x\.json is no usable tokenizer\.json"):
        load_tokenizer(str(tmp_path / "x.json"), EOD)


def test_without_the_package_the_way_to_it_is_named(tokenizer_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'mxjax\[tokenizers\]'"):
        load_tokenizer(tokenizer_file, EOD)
