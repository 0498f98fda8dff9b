import numpy as np
import pytest

from mxjax.data.tokenizer import ByteTokenizer


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
