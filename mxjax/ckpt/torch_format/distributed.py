"""Reading folders of ``torch.distributed.checkpoint``: ``.metadata`` and ``*.distcp`` files.

``.metadata`` is a pickle that says which tensors there are and where each chunk of them lies: file,
offset and length. At that place is a whole archive of ``torch.save``. What is not a tensor is a
"byte entry", most often such an archive too. Megatron's ``torch_dist`` and ``fsdp_dtensor`` formats
are such folders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mxjax.ckpt.torch_format.archive import TorchArchive
from mxjax.ckpt.torch_format.unpickle import unpickle
from mxjax.ckpt.torch_format.values import DTYPES, Global, Record, Tensor, TorchFormatError

METADATA = ".metadata"


@dataclass(frozen=True)
class Blob:
    """A part of a ``.distcp`` file."""

    path: Path
    offset: int
    length: int

    def problem(self) -> str | None:
        """Why it cannot be read; None if it is there in full length."""
        try:
            size = self.path.stat().st_size
        except OSError as error:
            return f"{self.path.name} cannot be read: {error.strerror}"
        if self.offset + self.length > size:
            return f"{self.path.name} is truncated: {size} of {self.offset + self.length} bytes"
        return None

    def archive(self) -> TorchArchive:
        """What is there, as an archive.

        Raises:
          TorchFormatError: the file is missing, truncated or not of torch.
        """
        return TorchArchive(self.path, self.offset, self.length)


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor: `sizes` elements of each dim from `offsets` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    blob: Blob


@dataclass(frozen=True, eq=False)
class DistTensor:
    """A tensor, stored in chunks that together cover it once."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[Chunk, ...] = field(repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def numpy(self) -> np.ndarray:
        """The whole tensor: mapped, read-only, if it is one chunk, else put together in memory.

        Raises:
          TorchFormatError: a file is missing, truncated, or holds something else.
        """
        if len(self.chunks) == 1:
            return self._stored(self.chunks[0]).numpy()
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
        """A block of the tensor, in memory of its own. Only chunks that overlap it are read.

        Args:
          offsets: its first element in each dim.
          sizes: its shape.

        Raises:
          TorchFormatError: as for :meth:`numpy`.
        """
        block = np.empty(tuple(sizes), self.dtype)
        for chunk in self.chunks:
            begins = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            ends = [
                min(a + n, b + m)
                for a, n, b, m in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
                continue
            there = _slices(begins, ends, chunk.offsets)
            block[_slices(begins, ends, offsets)] = self._stored(chunk).numpy()[there]
        return block

    def _stored(self, chunk: Chunk) -> Tensor:
        found = chunk.blob.archive().load()
        if not isinstance(found, Tensor) or found.dtype != self.dtype or found.shape != chunk.sizes:
            raise TorchFormatError(
                f"{chunk.blob.path}: at byte {chunk.blob.offset} should be a part of {self.name} of"
                f" shape {chunk.sizes} and dtype {self.dtype.name}."
            )
        return found


@dataclass(frozen=True, eq=False)
class ByteEntry:
    """An entry that is not a tensor."""

    name: str
    blob: Blob

    def load(self) -> Any:
        """The object saved there, as plain data.

        Raises:
          TorchFormatError: it is missing, truncated, or not an archive of torch.
        """
        return self.blob.archive().load()


class DistCheckpoint:
    """A folder of ``torch.distributed.checkpoint``, opened by its ``.metadata``.

    Attributes:
      tensors: by name, in the order of the file.
      byte_entries: by name, likewise.
      version: of the format, such as ``1.0.0``; None in files of older torch.

    Raises:
      TorchFormatError: ``.metadata`` is missing, damaged, or of another kind.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / METADATA
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TorchFormatError(
                f"{path} cannot be read: {error.strerror}. It is written last: without it the"
                " checkpoint was not completed."
            ) from error
        metadata = unpickle(data, str(path))
        self.tensors: dict[str, DistTensor] = {}
        self.byte_entries: dict[str, ByteEntry] = {}
        try:
            self.version: str | None = metadata.get("version")
            self._read(metadata)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, TorchFormatError):
                raise
            raise TorchFormatError(
                f"{path} is not the metadata of torch.distributed.checkpoint"
                f" ({type(error).__name__}: {error})."
            ) from error

    def missing(self) -> list[str]:
        """What is not there, one line a file; empty if all recorded bytes exist."""
        blobs = [chunk.blob for tensor in self.tensors.values() for chunk in tensor.chunks]
        blobs += [entry.blob for entry in self.byte_entries.values()]
        furthest: dict[Path, Blob] = {}
        for blob in blobs:
            known = furthest.setdefault(blob.path, blob)
            if blob.offset + blob.length > known.offset + known.length:
                furthest[blob.path] = blob
        return [problem for blob in furthest.values() if (problem := blob.problem())]

    def _read(self, metadata: Record) -> None:
        blobs = {}
        for index, info in metadata.get("storage_data").items():
            offset = index.get("offset")
            key = (index.get("fqn"), None if offset is None else tuple(offset))
            blobs[key] = self._blob(info)
        for name, kind in metadata.get("state_dict_metadata").items():
            if kind.cls.name == "BytesStorageMetadata":
                self.byte_entries[name] = ByteEntry(name, self._recorded(blobs, name, None))
            else:
                self.tensors[name] = self._tensor(name, kind, blobs)

    def _tensor(self, name: str, kind: Record, blobs: dict[Any, Blob]) -> DistTensor:
        properties = kind.get("properties")
        dtype = properties.state[0] if type(properties.state) is tuple else properties.get("dtype")
        if not isinstance(dtype, Global) or dtype.name not in DTYPES:
            raise TorchFormatError(f"{self.folder / METADATA}: {name} has unknown dtype {dtype}.")
        shape = tuple(kind.get("size"))
        chunks = []
        for record in kind.get("chunks"):
            offsets, sizes = tuple(record.get("offsets")), tuple(record.get("sizes"))
            chunks.append(Chunk(offsets, sizes, self._recorded(blobs, name, offsets)))
        tensor = DistTensor(name, shape, DTYPES[dtype.name], tuple(chunks))
        if uncovered := coverage_problem(tensor):
            raise TorchFormatError(
                f"{self.folder / METADATA}: {name} of shape {shape} {uncovered}."
            )
        return tensor

    def _recorded(self, blobs: dict[Any, Blob], name: str, offsets: tuple[int, ...] | None) -> Blob:
        # Tensors saved whole are recorded without an offset by some versions.
        blob = blobs.get((name, offsets)) or blobs.get((name, None))
        if blob is None:
            raise TorchFormatError(
                f"{self.folder / METADATA} does not say where {name} is"
                + (f" from {offsets} on." if offsets else ".")
            )
        return blob

    def _blob(self, info: Record) -> Blob:
        path, offset, length = (info.get(key) for key in ("relative_path", "offset", "length"))
        if not isinstance(path, str) or Path(path).name != path or path == ".." or "\0" in path:
            raise TorchFormatError(
                f"{self.folder / METADATA} names a file outside of it: {path!r}."
            )
        if info.get("transform_descriptors"):
            raise TorchFormatError(
                f"{path} was written with the extensions {info.get('transform_descriptors')}, such"
                " as compression. Save it again without."
            )
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise TorchFormatError(
                f"{self.folder / METADATA}: {path} has an entry at {offset!r} of {length!r} bytes."
            )
        return Blob(self.folder / path, offset, length)


def _slices(begins: Sequence[int], ends: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, origin, strict=True))


def coverage_problem(tensor: DistTensor) -> str | None:
    """Chunks must lie within the tensor, be distinct, and add up to it."""
    rank = len(tensor.shape)
    for chunk in tensor.chunks:
        numbers = (*chunk.offsets, *chunk.sizes)
        if len(chunk.offsets) != rank or len(chunk.sizes) != rank or min(numbers, default=0) < 0:
            return "has a chunk of another rank"
        if any(o + n > d for o, n, d in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)):
            return f"has a chunk outside of it, at {chunk.offsets} of {chunk.sizes}"
    if overlap := _overlap(tensor.chunks):
        return f"has chunks that overlap, at {overlap[0].offsets} and {overlap[1].offsets}"
    stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    if stored != tensor.size:
        return f"has chunks of {stored} elements in all instead of {tensor.size}"
    return None


def _overlap(chunks: Sequence[Chunk]) -> tuple[Chunk, Chunk] | None:
    """Two chunks that share an element; with none and the right sum they cover the tensor."""
    open_chunks: list[Chunk] = []
    for chunk in sorted((c for c in chunks if 0 not in c.sizes), key=lambda c: c.offsets[:1]):
        # Only those that reach beyond the start of this one along the first dim can still meet it.
        start = chunk.offsets[:1]
        open_chunks = [c for c in open_chunks if not start or c.offsets[0] + c.sizes[0] > start[0]]
        for other in open_chunks:
            places = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            if all(a < c + n and c < a + m for a, m, c, n in places):
                return other, chunk
        open_chunks.append(chunk)
    return None
