"""Which kind of checkpoint a path holds, and where the newest one in it lies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mxjax.ckpt.errors import CheckpointFormatError
from mxjax.ckpt.torch_format.distributed import METADATA

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file that names the newest iteration, or says ``release``."""

RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_ITERATION = re.compile(r"iter_(\d{7,})|release")


class Kind(StrEnum):
    """Formats of checkpoints."""

    MXJAX = "mxjax"
    MEGATRON_TORCH = "megatron torch"
    MEGATRON_DIST = "megatron torch_dist"
    TORCH_DIST = "torch.distributed.checkpoint"
    SAFETENSORS = "safetensors"
    TORCH_FILE = "torch file"


@dataclass(frozen=True)
class Location:
    """One checkpoint.

    Attributes:
      folder: where its files are; the file itself for a single file.
      step: from the name of the folder; None if that does not say.
      others: names of further checkpoints beside it.
      missing: what should be beside it and is not, one line each.
    """

    kind: Kind
    folder: Path
    step: int | None = None
    others: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def locate(path: str | Path) -> Location:
    """The checkpoint at `path`: a run or one of its steps, a Megatron folder or one of its
    iterations, a folder of safetensors, or a single file.

    Raises:
      CheckpointFormatError: there is none.
    """
    path = Path(path)
    if path.is_file():
        kind = Kind.SAFETENSORS if path.suffix == ".safetensors" else Kind.TORCH_FILE
        return Location(kind, path)
    if not path.is_dir():
        raise CheckpointFormatError(f"{path} does not exist.")
    found = _any(path)
    if found is None:
        below = [child for child in sorted(path.iterdir()) if child.is_dir() and _any(child)]
        if below:
            names = " or ".join(map(str, below))
            raise CheckpointFormatError(f"{path} holds no checkpoint itself; did you mean {names}?")
        raise CheckpointFormatError(
            f"{path} holds no checkpoint that is known: no checkpoints/<step> of mxjax, no"
            f" {TRACKER}, iter_NNNNNNN, mp_rank_NN or {METADATA} of Megatron or torch, no"
            f" *.safetensors and no *.pt. It holds {_names(path)}."
        )
    return found


def _any(path: Path) -> Location | None:
    return _one(path) or _run(path) or _megatron(path)


def _one(path: Path) -> Location | None:
    """`path` as a single checkpoint."""
    step = None
    if match := _ITERATION.fullmatch(path.name):
        step = int(match[1]) if match[1] else None
    if (path / "state" / "_METADATA").exists():
        return Location(Kind.MXJAX, path, int(path.name) if path.name.isdigit() else None)
    if any(RANK_FOLDER.fullmatch(entry.name) for entry in path.iterdir()):
        return Location(Kind.MEGATRON_TORCH, path, step)
    if (path / METADATA).exists() or any(path.glob("*.distcp")):
        kind = Kind.MEGATRON_DIST if (path / "metadata.json").exists() else Kind.TORCH_DIST
        return Location(kind, path, step)
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        return Location(Kind.SAFETENSORS, path)
    files = sorted(path.glob("*.pt"))
    if len(files) == 1:
        return Location(Kind.TORCH_FILE, files[0])
    return None


def _run(path: Path) -> Location | None:
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = sorted(int(e.name) for e in folder.iterdir() if e.name.isdigit() and e.is_dir())
    steps = [step for step in steps if (folder / str(step) / "state").is_dir()]
    if not steps:
        return None
    *earlier, newest = steps
    unfinished = [e.name for e in folder.iterdir() if ".orbax-checkpoint-tmp" in e.name]
    return Location(
        Kind.MXJAX,
        folder / str(newest),
        newest,
        tuple(map(str, earlier)),
        tuple(f"{name} was not completed" for name in sorted(unfinished)),
    )


def _megatron(path: Path) -> Location | None:
    names = sorted(e.name for e in path.iterdir() if _ITERATION.fullmatch(e.name) and e.is_dir())
    tracker = path / TRACKER
    if not tracker.exists():
        if not names:
            return None
        wanted, missing = names[-1], (f"{TRACKER}: the newest iteration is taken",)
    else:
        text = tracker.read_text(errors="replace").strip()
        wanted = f"iter_{int(text):07d}" if text.isdecimal() else text
        missing = ()
        if wanted not in names:
            raise CheckpointFormatError(
                f"{tracker} says {text!r:.80}, but {path} has {', '.join(names) or 'no iteration'}."
                " Give the path of one of them, or restore the missing one."
            )
    found = _one(path / wanted)
    if found is None:
        raise CheckpointFormatError(
            f"{path / wanted} holds neither mp_rank_NN folders nor {METADATA}, but"
            f" {_names(path / wanted)}."
        )
    others = tuple(name for name in names if name != wanted)
    return Location(found.kind, found.folder, found.step, others, missing)


def _names(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
