"""Reading ``.pt`` files, the zip archives that ``torch.save`` writes.

An archive holds one folder with ``data.pkl`` (the object, a pickle that refers to storages by
number), ``data/<number>`` (the bytes of a storage), ``byteorder`` and ``version``. Entries are
stored uncompressed, so tensors are mapped from the file and never copied here.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mxjax.ckpt.torch_format.unpickle import unpickle
from mxjax.ckpt.torch_format.values import STORAGES, Global, Storage, TorchFormatError

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_ENCRYPTED = 0x1
_NO_DIRECTORY = (
    zipfile.BadZipFile,
    struct.error,
    ValueError,
    ArithmeticError,
    LookupError,
    EOFError,
    NotImplementedError,
)
"""What `zipfile` raises at a file that is no archive, a truncated or a damaged one."""

_SUPPORTED_VERSIONS = range(1, 11)  # what torch itself reads

_SMALL = 1 << 14
"""Bytes below which reading is quicker than mapping."""

_FOREIGN = (
    (
        b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19",
        "is in torch's format of before 1.6 (a bare pickle, not a zip). Load it with torch and save"
        " it again",
    ),
    (b"version https://git-lfs", "is a Git LFS pointer: the file itself was not downloaded"),
    (b"\x89HDF", "is an HDF5 file, not torch's"),
    (b"\x80", "is a bare pickle, not a file of torch.save"),
)


class TorchArchive:
    """One ``.pt`` file, or one such archive within a larger file.

    Args:
      path: the file.
      offset: where the archive begins, in bytes.
      length: its length in bytes; None: up to the end of the file.

    Raises:
      TorchFormatError: it is truncated, foreign, compressed, encrypted, or of a torch that is too
        old or too new.
    """

    def __init__(self, path: str | Path, offset: int = 0, length: int | None = None) -> None:
        self.path = Path(path)
        try:
            size = self.path.stat().st_size
            self._length = size - offset if length is None else length
            if offset < 0 or self._length < 0 or offset + self._length > size:
                raise TorchFormatError(
                    f"{self.path} is truncated: it has {size} bytes, and an entry of {length} bytes"
                    f" should begin at byte {offset}."
                )
            self._offset = offset
            with self.path.open("rb") as file:
                self._records = self._read_directory(file)
        except OSError as error:
            raise TorchFormatError(f"{self.path} cannot be read: {error.strerror}.") from error
        self._check_kind()

    def load(self) -> Any:
        """The object that was saved, as plain data; tensors read their bytes when asked.

        Raises:
          TorchFormatError: the pickle is damaged or holds something else than data.
        """
        storages: dict[str, Storage] = {}

        def storage_of(identifier: Any) -> Storage:
            match identifier:
                case ("storage", Global() as kind, str(key), _device, int(count), *_):
                    if key not in storages:
                        storages[key] = self._storage(kind, key, count)
                    return storages[key]
            raise TorchFormatError("it refers to a tensor in an unknown way")

        return unpickle(self._read("data.pkl"), str(self.path), storage_of)

    def damaged(self) -> list[str]:
        """Entries whose bytes do not have the checksum that was stored with them. Reads all."""
        return [name for name, info in self._records.items() if self._checksum(info) != info.CRC]

    def _read_directory(self, file: io.BufferedReader) -> dict[str, zipfile.ZipInfo]:
        window = _Window(file, self._offset, self._length)
        try:
            # It finds the directory at the end, and so a truncated file has none.
            with zipfile.ZipFile(window) as archive:
                infos, directory = archive.infolist(), archive.start_dir
        except _NO_DIRECTORY as error:
            raise self._foreign(file) from error
        records: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            name = info.filename.partition("/")[2]
            if name in records:
                raise TorchFormatError(f"{self.path} has two entries {info.filename}.")
            if info.flag_bits & _ENCRYPTED:
                raise TorchFormatError(f"{self.path} is encrypted; unpack it with its password.")
            if info.compress_type != zipfile.ZIP_STORED:
                raise TorchFormatError(
                    f"{self.path}: entry {info.filename} is compressed, which torch never does."
                    " Unpack it and save it again with torch."
                )
            if info.header_offset < 0 or info.header_offset + info.file_size > directory:
                raise TorchFormatError(
                    f"{self.path} is damaged: entry {info.filename} of {info.file_size} bytes does"
                    f" not fit between bytes {info.header_offset} and {directory}."
                )
            records[name] = info
        return records

    def _foreign(self, file: io.BufferedReader) -> TorchFormatError:
        file.seek(self._offset)
        head = file.read(512)
        for magic, meaning in _FOREIGN:
            if head.startswith(magic):
                return TorchFormatError(f"{self.path} {meaning}.")
        if head[257:262] == b"ustar":
            return TorchFormatError(
                f"{self.path} is a tar archive: torch's format of before 0.4, or not torch's."
            )
        if head.startswith(b"PK\x03\x04"):
            return TorchFormatError(
                f"{self.path} is truncated or damaged: it begins as a torch file does, but the"
                f" directory at its end (byte {self._offset + self._length}) is missing or broken."
            )
        return TorchFormatError(f"{self.path} is not a file of torch.save.")

    def _check_kind(self) -> None:
        if "data.pkl" not in self._records:
            raise TorchFormatError(
                f"{self.path} is a zip file without data.pkl, so not a file of torch.save."
            )
        if "constants.pkl" in self._records:
            raise TorchFormatError(
                f"{self.path} is a TorchScript program, not a checkpoint. Save the state_dict()."
            )
        order = self._read("byteorder") if "byteorder" in self._records else b"little"
        if order != b"little":
            raise TorchFormatError(
                f"{self.path} has byte order {order!r:.40}; only little-endian files are read."
            )
        version = self._read("version").strip() if "version" in self._records else b"missing"
        if not version.isdigit() or int(version) not in _SUPPORTED_VERSIONS:
            raise TorchFormatError(
                f"{self.path} has format version {version.decode(errors='replace'):.40}; versions"
                f" {_SUPPORTED_VERSIONS[0]} to {_SUPPORTED_VERSIONS[-1]} are read."
            )

    def _storage(self, kind: Global, key: str, count: int) -> Storage:
        if kind.name not in STORAGES:
            raise TorchFormatError(f"it holds a tensor in a {kind}, a kind that is not read")
        dtype = STORAGES[kind.name]
        info = self._records.get(f"data/{key}")
        if info is None:
            raise TorchFormatError(f"it refers to storage {key}, which is not in the file")
        nbytes = count * dtype.itemsize
        if not 0 <= nbytes <= info.file_size:
            raise TorchFormatError(
                f"storage {key} should have {nbytes} bytes and has {info.file_size}"
            )

        def read(start: int, stop: int) -> np.ndarray:
            return self._map(info, start, stop)

        return Storage(key, dtype, nbytes, read)

    def _read(self, name: str) -> bytes:
        info = self._records[name]
        return self._map(info, 0, info.file_size).tobytes()

    def _map(self, info: zipfile.ZipInfo, start: int, stop: int) -> np.ndarray:
        """Bytes `start` to `stop` of an entry, mapped."""
        if start == stop:
            return np.empty(0, np.uint8)
        with self.path.open("rb") as file:
            file.seek(self._offset + info.header_offset)
            header = file.read(_LOCAL_HEADER.size)
            if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
                raise TorchFormatError(
                    f"{self.path} is truncated or damaged: entry {info.filename} has no header."
                )
            *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            begin = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            size = os.fstat(file.fileno()).st_size - self._offset
            if begin + stop > min(self._length, size):
                raise TorchFormatError(
                    f"{self.path} is truncated or damaged: entry {info.filename} should end at byte"
                    f" {self._offset + begin + stop}."
                )
            at = self._offset + begin + start
            if stop - start < _SMALL:
                file.seek(at)
                return np.frombuffer(file.read(stop - start), np.uint8)
            # A mapping of this range only, and of its own: what is mapped counts as memory used
            # until it is unmapped, and a checkpoint may be larger than the memory.
            page = at - at % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(
                file.fileno(), at - page + stop - start, access=mmap.ACCESS_READ, offset=page
            )
        return np.frombuffer(mapped, np.uint8, stop - start, at - page)

    def _checksum(self, info: zipfile.ZipInfo) -> int:
        checksum = 0
        for start, stop in _blocks(info.file_size):
            checksum = zlib.crc32(self._map(info, start, stop), checksum)
        return checksum


def _blocks(size: int, block: int = 1 << 26) -> Iterator[tuple[int, int]]:
    for start in range(0, size, block):
        yield start, min(start + block, size)


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("seek before the beginning")  # what zipfile expects of a short file
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data
