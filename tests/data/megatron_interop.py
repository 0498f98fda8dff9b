"""Real Megatron-LM against our indexed datasets; run by hand, in a Python that has megatron-core.

    python tests/data/megatron_interop.py generate

writes ``golden_megatron/`` with Megatron's own ``IndexedDatasetBuilder``; the tests compare our
reader and our writer with these files.

    python tests/data/megatron_interop.py read EXPECTED.json

reads datasets that mxjax wrote with Megatron's own ``IndexedDataset`` and compares them with
EXPECTED.json: {PREFIX: {"dtype": ..., "documents": [[sequence, ...], ...], "modes": [...] or null}}.

Both print the version of megatron-core. The files in the repository are from 0.19.2 (wheel from
PyPI, unpacked, with the CPU build of PyTorch 2.13.0 on Python 3.11).
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from megatron.core import __version__
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

FOLDER = Path(__file__).parent / "golden_megatron"
PLAIN = [[[5, 0, 120, 7, 1]], [[33]], [[1, 2, 3, 4, 5, 6, 7, 8, 9]], [[101, 0]]]


def cases() -> dict[str, dict]:
    """Documents, as lists of sequences, by the name of their dataset."""
    cases = {}
    for dtype in DType:
        kind = np.dtype(dtype.name)
        if kind.kind == "f":
            edges = [0.5, -2.25]
        else:
            edges = [int(np.iinfo(kind).min), int(np.iinfo(kind).max)]
        cases[dtype.name] = {"documents": [*PLAIN, [edges]]}
    cases["sentences"] = {  # documents of several sequences, none, and an empty one
        "documents": [[[1, 2, 3], [4, 5]], [], [[6], [7, 8], [9, 10, 11]], [[]], [[12, 13]]],
        "dtype": "uint16",
    }
    cases["text_modes"] = {
        "documents": [[[1, 2], [3]], [[4, 5]]],
        "modes": [0, 0, 0],
        "dtype": "uint16",
    }
    cases["multimodal"] = {
        "documents": [[[1, 2, 3], [70000, 2], [4]], [[5, 6]]],
        "modes": [0, 1, 0, 2],
        "dtype": "int32",
    }
    return {name: {"dtype": name, "modes": None} | case for name, case in cases.items()}


def generate() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, case in cases().items():
        multimodal = case["modes"] is not None
        modes = iter(case["modes"] or ())
        dtype = getattr(np, case["dtype"])
        builder = IndexedDatasetBuilder(f"{FOLDER}/{name}.bin", dtype, multimodal=multimodal)
        for sequences in case["documents"]:
            for sequence in sequences:
                values = torch.from_numpy(np.array(sequence, dtype))
                builder.add_item(values, next(modes) if multimodal else 0)
            builder.end_document()
        builder.finalize(f"{FOLDER}/{name}.idx")
    (FOLDER / "documents.json").write_text(json.dumps(cases(), indent=1) + "\n")
    print(f"megatron-core {__version__} wrote {len(cases())} datasets into {FOLDER}")


def read(expected_file: str) -> None:
    expected = json.loads(Path(expected_file).read_text())
    for prefix, case in expected.items():
        multimodal = case["modes"] is not None
        for mmap in (True, False):
            dataset = IndexedDataset(prefix, multimodal=multimodal, mmap=mmap)
            items = [dataset[i] for i in range(len(dataset))]
            sequences = [item[0] if multimodal else item for item in items]
            bounds = dataset.document_indices.tolist()
            documents = [
                [sequence.tolist() for sequence in sequences[first:last]]
                for first, last in pairwise(bounds)
            ]
            assert dataset.index.dtype.__name__ == case["dtype"], prefix
            assert documents == case["documents"], prefix
            if multimodal:
                assert [int(item[1]) for item in items] == case["modes"], prefix
        tokens = sum(map(len, sequences))
        print(f"{prefix}: {case['dtype']}, {len(documents)} documents, {tokens} tokens: equal")
    print(f"megatron-core {__version__} read {len(expected)} datasets, mapped and from the file")


if __name__ == "__main__":
    if sys.argv[1] == "generate":
        generate()
    else:
        read(sys.argv[2])
