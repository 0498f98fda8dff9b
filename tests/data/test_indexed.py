"""Our reader and writer against files of the real megatron-core (see ``megatron_interop.py``)."""

import json
import shutil
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from mxjax.data import indexed
from mxjax.data.errors import DataError
from mxjax.data.indexed import IndexedWriter, open_indexed, read_indexed, token_dtype
from mxjax.data.packing import PackedSamples
from mxjax.data.store import TokenStore

GOLDEN = Path(__file__).parent / "golden_megatron"
CASES = json.loads((GOLDEN / "documents.json").read_text())


def write(prefix, documents, dtype="uint16", **options):
    with IndexedWriter(str(prefix), np.dtype(dtype), **options) as writer:
        for document in documents:
            writer.add_document(*(np.array(s) for s in document))
    return str(prefix)


def documents_of(store):
    ranges = zip(store.starts, store.lengths, strict=True)
    return [store.tokens[start : start + length].tolist() for start, length in ranges]


@pytest.mark.parametrize("name", CASES)
def test_megatrons_files_are_read(name):
    case, dataset = CASES[name], open_indexed(f"{GOLDEN}/{name}")
    assert dataset.tokens.dtype == case["dtype"]
    starts, lengths = dataset.document_ranges()
    found = [dataset.tokens[a : a + n].tolist() for a, n in zip(starts, lengths, strict=True)]
    whole = [[*chain(*document)] for document in case["documents"]]
    assert found == [document for document in whole if document]
    assert dataset.num_documents == len(whole)
    sequences = [len(sequence) for document in case["documents"] for sequence in document]
    assert dataset.sequence_lengths.tolist() == sequences
    modes = dataset.sequence_modes
    assert (None if modes is None else modes.tolist()) == case["modes"]


@pytest.mark.parametrize("name", CASES)
def test_the_same_documents_give_megatrons_files_byte_for_byte(name, tmp_path):
    case = CASES[name]
    modes = iter(case["modes"] or ())
    multimodal = case["modes"] is not None
    prefix = str(tmp_path / name)
    with IndexedWriter(prefix, np.dtype(case["dtype"]), multimodal=multimodal) as writer:
        for document in case["documents"]:
            sequences = [np.array(sequence) for sequence in document]
            own_modes = [next(modes) for _ in document] if multimodal else None
            writer.add_document(*sequences, modes=own_modes)
    for suffix in (".bin", ".idx"):
        assert Path(prefix + suffix).read_bytes() == (GOLDEN / (name + suffix)).read_bytes()


def test_several_datasets_are_one_store_of_their_documents():
    store = read_indexed([f"{GOLDEN}/{name}" for name in ("sentences", "uint8", "text_modes")], 256)
    expected = [
        *[[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13]],
        *[[*chain(*document)] for document in CASES["uint8"]["documents"]],
        *[[1, 2, 3], [4, 5]],
    ]
    assert documents_of(store) == expected
    assert store.tokens[3:16].tolist() == [*chain(*expected)][3:16]  # over the seam of two files


def test_samples_are_those_of_the_same_documents_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 1000, n) for n in rng.integers(1, 40, 200)]
    paths = [
        write(tmp_path / name, [[d] for d in part], dtype)
        for name, part, dtype in [("a", documents[:70], "uint16"), ("b", documents[70:], "int64")]
    ]
    lengths = np.array([len(d) for d in documents])
    memory = TokenStore(np.concatenate(documents), np.cumsum(lengths) - lengths, lengths)
    settings = {"document_mask": True, "shuffle_seed": 3, "num_epochs": 1}
    on_disk = PackedSamples(read_indexed(paths, 1000), 16, **settings)
    in_memory = PackedSamples(memory, 16, **settings)
    assert on_disk.num_samples == in_memory.num_samples > 200
    for i in range(on_disk.num_samples):
        for name, values in in_memory[i].items():
            np.testing.assert_array_equal(on_disk[i][name], values)
            assert on_disk[i][name].dtype == np.int32


def test_a_large_corpus_is_neither_read_at_the_start_nor_for_a_fingerprint(tmp_path):
    """The file of 2 TB is sparse; reading a hundredth of it would take minutes."""
    prefix = write(tmp_path / "x", [[[1, 2, 3]]])
    num_sequences, length = 1000, 10**9
    lengths = np.full(num_sequences, length, "<i4")
    pointers = np.arange(num_sequences, dtype="<i8") * length * 2
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, num_sequences, num_sequences + 1)
    documents = np.arange(num_sequences + 1, dtype="<i8")
    index = header + lengths.tobytes() + pointers.tobytes() + documents.tobytes()
    (tmp_path / "x.idx").write_bytes(index)

    def samples():
        store = read_indexed([prefix], 10)
        return PackedSamples(store, 4096, document_mask=True, shuffle_seed=None, num_epochs=None)

    with open(tmp_path / "x.bin", "r+b") as file:
        file.truncate(num_sequences * length * 2)
    first = samples()
    assert first.num_tokens == 10**12
    before = first.fingerprint
    with open(tmp_path / "x.bin", "r+b") as file:
        file.write(b"\5")
    assert samples().fingerprint != before


def test_a_store_on_disk_is_probed_at_its_beginning_and_end():
    class Positions:
        def __len__(self):
            return 10**12

        def __getitem__(self, positions):
            return np.arange(*positions.indices(10**12))

    probe = TokenStore(Positions(), np.array([0]), np.array([10**12])).probe()
    assert (probe[0], probe[-1]) == (0, 10**12 - 1)
    assert len(probe) < 10**7


@pytest.mark.parametrize(
    ("name", "vocab_size", "words"),
    [
        ("float32", 99, "holds float32 numbers"),
        ("float64", 99, "holds float64 numbers"),
        ("multimodal", 99, "2 of 4 sequences are not text"),
    ],
)
def test_what_is_no_text_is_refused(name, vocab_size, words):
    with pytest.raises(DataError, match=rf"golden_megatron/{name}\.idx: {words}"):
        read_indexed([f"{GOLDEN}/{name}"], vocab_size)


@pytest.mark.parametrize(("dtype", "bad"), [("uint16", 320), ("int32", -1), ("int64", 2**33)])
def test_an_id_outside_of_the_vocabulary_is_an_error_when_it_is_read(tmp_path, dtype, bad):
    prefix = write(tmp_path / "x", [[[1, 2, 3]], [[4, bad]]], dtype)
    store = read_indexed([prefix], 320)
    assert store.tokens[0:4].tolist() == [1, 2, 3, 4]
    with pytest.raises(DataError, match=rf"x\.bin: holds the id {bad}, .*model\.vocab_size is 320"):
        store.tokens[3:5]


def change(at, content):
    return lambda data: data[:at] + content + data[at + len(content) :]


U64 = struct.Struct("<Q").pack
COUNTS = 18  # place of the two counts in the header
LENGTHS = 34  # of 3 sequences, then 3 pointers, then 4 document indices


@pytest.mark.parametrize(
    ("suffix", "damage", "words"),
    [
        (".idx", change(0, b"PK"), r"x\.idx: not the index .*begins with b'PKIDIDX"),
        (".idx", lambda _: b"", r"x\.idx: not the index"),
        (".idx", lambda data: data[:20], r"x\.idx: cut off inside its header \(20 of 34"),
        (".idx", change(9, U64(2)), r"x\.idx: version 2 of the format"),
        (".idx", change(17, b"\0"), r"x\.idx: dtype code 0 is unknown"),
        (".idx", change(17, b"\x09"), r"x\.idx: dtype code 9 is unknown"),
        (".idx", lambda data: data[:-1], r"x\.idx: cut off: 3 sequences and 4 .*has 101"),
        (".idx", lambda data: data + b"\0\0", r"x\.idx: not what its header says"),
        (".idx", change(COUNTS, U64(2**60)), r"x\.idx: cut off: 1152921504606846976 sequences"),
        (".idx", change(LENGTHS + 36, U64(1)), r"x\.idx: its document index runs from 1 to 3"),
        (".idx", change(LENGTHS + 60, U64(2)), r"x\.idx: its document index runs from 0 to 2"),
        (".idx", change(LENGTHS + 44, U64(3)), r"x\.idx: its document index goes backwards"),
        (".idx", change(LENGTHS, b"\xff\xff\xff\xff"), r"x\.idx: damaged: a sequence has a neg"),
        (".idx", change(LENGTHS + 20, U64(5)), r"x\.idx: damaged: .* begin at a token"),
        (".idx", change(LENGTHS + 28, U64(98)), r"x\.bin: has 18 bytes, .*x\.idx names .* 104"),
        (".bin", lambda data: data[:-2], r"x\.bin: has 16 bytes, .*x\.idx names .* 18; .*cut off"),
        (".bin", lambda _: b"", r"x\.bin: has 0 bytes"),
    ],
)
def test_damaged_files_are_named(tmp_path, suffix, damage, words):
    write(tmp_path / "x", [[[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]])
    path = tmp_path / f"x{suffix}"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=words):
        open_indexed(str(tmp_path / "x"))


def test_an_index_without_documents_is_an_error(tmp_path):
    (tmp_path / "x.bin").touch()
    (tmp_path / "x.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 0, 0))
    with pytest.raises(DataError, match="its document index is empty and should run from 0 to 0"):
        open_indexed(str(tmp_path / "x"))


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_missing_file_of_the_pair_is_named(tmp_path, suffix):
    write(tmp_path / "x", [[[1, 2]]])
    (tmp_path / f"x{suffix}").unlink()
    with pytest.raises(DataError, match=rf"x\{suffix}: no such file; .*data\.paths"):
        open_indexed(str(tmp_path / "x"))


@pytest.mark.parametrize("at_a_time", [1, 2, 100])
def test_an_index_may_leave_out_documents_but_not_cut_one_into_pieces(
    tmp_path, monkeypatch, at_a_time
):
    """Filtered corpora point into a larger ``.bin`` file, in any order."""
    monkeypatch.setattr(indexed, "_SEQUENCES_AT_A_TIME", at_a_time)
    write(tmp_path / "x", [[[1, 2, 3]], [[4], [5, 6]]])
    index = tmp_path / "x.idx"
    good = index.read_bytes()
    pointers = LENGTHS + 12
    index.write_bytes(change(pointers, U64(6) + U64(0) + U64(2))(good))
    assert documents_of(read_indexed([str(tmp_path / "x")], 99)) == [[4, 5, 6], [1, 2, 3]]
    index.write_bytes(change(pointers, U64(0) + U64(10) + U64(6))(good))
    with pytest.raises(DataError, match=r"x\.idx: sequence 2 does not follow the one before"):
        open_indexed(str(tmp_path / "x"))


def test_nothing_half_written_is_left_behind(tmp_path):
    def fail_in_the_middle():
        with IndexedWriter(str(tmp_path / "x"), np.dtype("uint16")) as writer:
            writer.add_document(np.array([1]))
            assert not (tmp_path / "x.bin").exists()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle()
    assert not list(tmp_path.iterdir())


def test_an_existing_dataset_is_only_replaced_if_asked_for(tmp_path):
    write(tmp_path / "x", [[[1, 2]]])
    with pytest.raises(DataError, match=r"x\.idx: exists already"):
        write(tmp_path / "x", [[[3]]])
    assert open_indexed(str(tmp_path / "x")).tokens.tolist() == [1, 2]
    write(tmp_path / "x", [[[3]]], overwrite=True)
    assert open_indexed(str(tmp_path / "x")).tokens.tolist() == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


@pytest.mark.parametrize(("dtype", "bad"), [("uint16", 65536), ("uint8", -1), ("int32", 2**31)])
def test_ids_that_do_not_fit_are_refused_not_wrapped(tmp_path, dtype, bad):
    with pytest.raises(DataError, match=f"does not fit into {dtype}"):
        write(tmp_path / "x", [[[1, bad]]], dtype)


def test_token_ids_are_as_wide_as_megatron_makes_them():
    """Its `DType.optimal_dtype`."""
    assert [token_dtype(n) for n in (257, 65499, 65500, 128256)] == ["u2", "u2", "i4", "i4"]


def test_a_copy_of_the_two_files_is_the_same_data(tmp_path):
    for suffix in (".bin", ".idx"):
        shutil.copy(GOLDEN / f"uint16{suffix}", tmp_path / f"copy{suffix}")
    settings = {"document_mask": True, "shuffle_seed": 0, "num_epochs": None}
    first, second = (
        PackedSamples(read_indexed([str(prefix)], 65536), 4, **settings)
        for prefix in (GOLDEN / "uint16", tmp_path / "copy")
    )
    assert first.fingerprint == second.fingerprint
