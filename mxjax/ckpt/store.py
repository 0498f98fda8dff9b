"""Checkpoints of a run, written and read through Orbax.

One checkpoint is one directory ``<run_dir>/checkpoints/<step>``: Orbax writes it under a temporary
name and renames it when it is complete, so that a directory with a plain number for a name is a
committed checkpoint. ``docs/checkpoints.md`` describes layout, resuming and limits.

All processes of a run call the methods of their store in the same order; only
:meth:`CheckpointStore.check` is local to a process.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from mxjax.ckpt.pending import PendingSave, WatchedStateHandler
from mxjax.ckpt.tree import differences, named_leaves, nested
from mxjax.config.schema import CheckpointConfig

_LARGE_BYTES = 1 << 26

# What Orbax calls the directory of a step until it is complete.
_UNCOMMITTED = re.compile(r"\d+\.orbax-checkpoint-tmp(-\d+)?")


class CheckpointError(RuntimeError):
    """A checkpoint directory that cannot be used as asked."""


class CheckpointSaveError(CheckpointError):
    """A checkpoint that was not written.

    With several processes, the one that gets it should end with ``os._exit``: a normal exit would
    wait for Orbax's threads, which wait for the other processes, which wait for this one.
    """


class CheckpointRestoreError(CheckpointError):
    """A checkpoint that does not exist or cannot be read."""


class CheckpointMismatchError(CheckpointRestoreError):
    """A checkpoint whose arrays are not those of the state to be restored."""


class CheckpointStore:
    """Saves and restores the state of one run.

    With ``config.save_interval`` 0 the store only reads: it creates, cleans and deletes nothing,
    and may be opened on the directory of a run that is still going on.
    Otherwise what killed runs left half written is removed, so a directory has one writer at most.

    Args:
      run_dir: the run's directory; on several hosts, on a file system that all of them share.
      config: the ``checkpoint`` part of the configuration.

    Raises:
      CheckpointError: the directory cannot be created or written.
    """

    def __init__(self, run_dir: str | Path, config: CheckpointConfig) -> None:
        self.directory = Path(run_dir).absolute() / "checkpoints"
        self._config = config
        self._writable = config.save_interval > 0
        self._pending: PendingSave | None = None
        if self._writable:
            self._prepare_directory()
        # Process 0 lists the directory for all: on a network file system the others may see it
        # late, and processes that resume from different steps would hang or diverge.
        self._name_format = ocp.path.step.standard_name_format(single_host_load_and_broadcast=True)
        options = ocp.CheckpointManagerOptions(
            create=False,
            save_root_metadata=False,
            step_name_format=self._name_format,
            single_host_load_and_broadcast=True,
            enable_async_checkpointing=config.async_save,
            # Created in the background, a folder that cannot be made leaves a thread waiting that
            # keeps the failed process from exiting for five minutes (seen with Orbax 0.12.8).
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            preservation_policy=_keep_policy(config),
        )
        self._state_handler = WatchedStateHandler()
        handlers = ocp.DefaultCheckpointHandlerRegistry()
        handlers.add("state", ocp.args.StandardSave, self._state_handler)
        handlers.add("state", ocp.args.StandardRestore, self._state_handler)
        self._manager = ocp.CheckpointManager(
            epath.Path(self.directory), options=options, handler_registry=handlers
        )

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Writes one checkpoint, in the background if ``config.async_save``.

        Returns when `state` is copied, so its buffers may be donated at once. Waits first for the
        save before this one: at most one is under way.

        Args:
          step: number of the checkpoint, higher than all that exist.
          state: pytree of global ``jax.Array``.
          metadata: what JSON can hold, kept in the same checkpoint.

        Raises:
          CheckpointSaveError: this save cannot start, or the one before it failed.
        """
        if not self._writable:
            raise CheckpointSaveError(
                f"Checkpoint {step} not saved: checkpoint.save_interval is 0, so this run may not"
                " write checkpoints. Set it to 1 or more."
            )
        self.wait()
        # Orbax decides by its memory what exists and what to keep: make that what is on disk.
        self._manager.reload()
        if conflicting := [other for other in self.steps() if other >= step]:
            raise CheckpointSaveError(
                f"Checkpoint {step} not saved: {self.directory} already holds"
                f" {_listed(conflicting)}, and steps are saved in ascending order. Move"
                " them away, or use another run_dir."
            )
        items = _save_items(step, state, metadata)
        pending = self._state_handler.pending = PendingSave(step)
        try:
            # force: whether this step is to be saved was decided by the caller.
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            raise self._save_error(step, error) from error
        if self._config.async_save:
            self._pending = pending
            threading.Thread(target=self._await_commit, args=(pending,), daemon=True).start()

    def check(self) -> None:
        """Raises if a background save has failed; does not wait. Call it each training step.

        Raises:
          CheckpointSaveError: naming step, directory and cause.
        """
        if self._pending is not None and self._pending.settled.is_set():
            self.wait()

    def wait(self) -> None:
        """Waits until the save under way, if any, is committed.

        Raises:
          CheckpointSaveError: it failed.
        """
        pending = self._pending
        if pending is None:
            return
        pending.settled.wait()
        if pending.failure is not None and jax.process_count() > 1:
            # It stays pending: the others wait for this process at a barrier of the save, and
            # nothing can be saved any more.
            raise self._save_error(pending.step, pending.failure) from pending.failure
        self._pending = None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._save_error(pending.step, error) from error

    def close(self) -> None:
        """Waits for the save under way and releases threads; the store is of no use afterwards.

        Raises:
          CheckpointSaveError: the save under way failed.
        """
        try:
            self.wait()
        finally:
            if self._pending is None:
                self._manager.close()

    def steps(self) -> list[int]:
        """Steps of all committed checkpoints, ascending, as they are on disk now."""
        return sorted(found.step for found in self._name_format.find_all(self.directory))

    def latest_step(self) -> int | None:
        """Newest committed step on disk; None if there is none. A save under way is not one."""
        return max(self.steps(), default=None)

    def resume_step(self) -> int | None:
        """The step to resume from: ``config.restore_step``, else the newest; None: start anew.

        Raises:
          CheckpointRestoreError: ``config.restore_step`` does not exist, or later steps do.
        """
        step = self._config.restore_step
        if step is None:
            return self.latest_step()
        later = [other for other in self._require(step) if other > step]
        if later:
            aside = f"{self.directory}.after_{step}"
            moved = " ".join(str(self.directory / str(other)) for other in later)
            raise CheckpointRestoreError(
                f"checkpoint.restore_step is {step}, but {self.directory} also holds"
                f" {_listed(later)}: going on would mix two histories. Nothing is deleted for you."
                " To go on from the newest, leave checkpoint.restore_step out. To branch off at"
                f" {step}, move the later ones away:\n"
                f"  mkdir -p {aside} && mv {moved} {aside}\n"
                f"or copy {self.directory / str(step)} to <new run_dir>/checkpoints/ and run there."
            )
        return step

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Reads one checkpoint onto the mesh and shardings of `abstract_state`, bit for bit.

        Args:
          abstract_state: pytree of ``jax.ShapeDtypeStruct`` with shardings; any mesh, also another
            than the one that saved.
          step: the step to read, whatever later ones there are; None: that of ``resume_step()``.

        Returns:
          The state, in the structure of `abstract_state`, and the metadata that was saved with it.

        Raises:
          CheckpointMismatchError: names, shapes or dtypes differ; all of them are listed.
          CheckpointRestoreError: the step does not exist or cannot be read. There is no silent
            fall-back to an earlier one.
        """
        if step is None:
            step = self.resume_step()
        if step is None:
            raise CheckpointRestoreError(f"No checkpoint in {self.directory}.")
        steps = self._require(step)
        wanted = named_leaves(abstract_state)
        for name, leaf in wanted.items():
            if leaf.sharding is None:
                raise ValueError(f"abstract_state: {name} has no sharding.")
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(nested(wanted)), metadata=ocp.args.JsonRestore()
        )
        try:
            self._require_match(step, wanted)
            restored = self._manager.restore(step, args=items)
        except (CheckpointError, jax.errors.JaxRuntimeError):
            # The second is a device's trouble, such as memory, not the checkpoint's.
            raise
        except Exception as error:
            raise self._unreadable(step, steps, error) from error
        leaves = named_leaves(restored["state"])
        state = jax.tree.unflatten(
            jax.tree.structure(abstract_state), [leaves[name] for name in wanted]
        )
        return state, restored["metadata"]

    def _await_commit(self, pending: PendingSave) -> None:
        # The error, if any, is raised by the thread that calls wait().
        with contextlib.suppress(Exception):
            self._manager.wait_until_finished()
        pending.settled.set()

    def _prepare_directory(self) -> None:
        try:
            # Each process, so that none depends on seeing another's new directory in time.
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
            if jax.process_index() == 0:
                for entry in self.directory.iterdir():
                    if _UNCOMMITTED.fullmatch(entry.name):
                        shutil.rmtree(entry)
        except OSError as error:
            raise CheckpointError(
                f"Cannot write checkpoints to {self.directory}: {error}. Set run_dir to a folder"
                " that this run may create and write, or checkpoint.save_interval to 0."
            ) from error

    def _require(self, step: int) -> list[int]:
        steps = self.steps()
        if step not in steps:
            raise CheckpointRestoreError(
                f"There is no checkpoint {step} in {self.directory}, which holds {_listed(steps)}."
                " Set checkpoint.restore_step to one that exists, or leave it out to resume from"
                " the newest."
            )
        return steps

    def _require_match(self, step: int, wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
        path = epath.Path(self.directory) / str(step) / "state"
        found = named_leaves(ocp.StandardCheckpointHandler().metadata(path).tree)
        differing = differences(found, wanted)
        if differing:
            lines = "\n".join(f"  {line}" for line in differing)
            raise CheckpointMismatchError(
                f"Checkpoint {step} in {self.directory} does not fit this run's state:\n{lines}\n"
                "Resume with the model, optimizer and precision settings that wrote it (such as"
                " training.param_dtype, optimizer.moments_dtype), or start anew with another"
                " run_dir (init_from.path can take the weights of this one)."
            )

    def _save_error(self, step: int, error: Exception) -> CheckpointSaveError:
        return CheckpointSaveError(
            f"Checkpoint {step} was not saved to {self.directory}: {error}\n"
            "Remove the cause (full disk, missing folder, permissions) and run again: the run"
            " resumes from the newest committed step."
        )

    def _unreadable(self, step: int, steps: list[int], error: Exception) -> CheckpointRestoreError:
        path = self.directory / str(step)
        # Orbax says which chunk it read; what went wrong with which file is in the cause, followed
        # by TensorStore's whole specification of the array.
        while error.__cause__ is not None:
            error = error.__cause__
        reason = str(error).partition(" [tensorstore_spec=")[0]
        if isinstance(error, json.JSONDecodeError):
            reason = f"{reason}, in {' and '.join(map(str, _broken_json(path)))}"
        earlier = max((other for other in steps if other < step), default=None)
        way_out = (
            "there is no earlier one: start anew with another run_dir."
            if earlier is None
            else f"move {path} elsewhere, set checkpoint.restore_step to {earlier} and run again."
        )
        return CheckpointRestoreError(
            f"Checkpoint {step} in {self.directory} cannot be read: {reason}\n"
            f"If its files are damaged or incomplete, {way_out}"
        )


def _save_items(step: int, state: Any, metadata: Mapping[str, Any]) -> ocp.args.Composite:
    """What Orbax is to write, checked here because its own errors come late and name no leaf."""
    arrays = named_leaves(state)
    for name, leaf in arrays.items():
        if not isinstance(leaf, jax.Array):
            raise CheckpointSaveError(
                f"Checkpoint {step} not saved: state leaf {name} is a {type(leaf).__name__},"
                " not a jax.Array."
            )
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointSaveError(
            f"Checkpoint {step} not saved: its metadata is not JSON: {error}"
        ) from error
    chunks = {name: _chunks(leaf) for name, leaf in arrays.items()}
    return ocp.args.Composite(
        state=ocp.args.StandardSave(nested(arrays), save_args=nested(chunks)),
        metadata=ocp.args.JsonSave(dict(metadata)),
    )


def _chunks(leaf: jax.Array) -> ocp.SaveArgs:
    """A device's part of an array is stored in one piece, or layer by layer if it is large: who
    reads one layer has to decode the pieces that it is in."""
    shape = leaf.sharding.shard_shape(leaf.shape)
    # What has two dims is no stack of matrices but the embedding or the head.
    large = leaf.ndim > 2 and math.prod(shape) * leaf.dtype.itemsize > _LARGE_BYTES
    return ocp.SaveArgs(shard_axes=(0,) if large else ())


def _broken_json(path: Path) -> list[Path]:
    """The damaged ones among the JSON files of a checkpoint: a JSON error names no file."""
    broken = []
    for file in (
        path / "metadata" / "metadata",
        path / "state" / "_METADATA",
        *sorted((path / "state" / "array_metadatas").glob("*")),
    ):
        try:
            json.loads(file.read_text())
        except ValueError:
            broken.append(file)
    return broken


def _keep_policy(config: CheckpointConfig) -> Any:
    policy = ocp.checkpoint_managers.preservation_policy
    newest = policy.LatestN(config.keep_last)
    if not config.keep_every:
        return newest
    return policy.AnyPreservationPolicy([newest, policy.EveryNSteps(config.keep_every)])


def _listed(steps: list[int]) -> str:
    if not steps:
        return "none"
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
