"""Errors of reading checkpoints that others wrote."""


class CheckpointFormatError(ValueError):
    """A file or folder that is not a checkpoint, is damaged, or is of a kind that is not read."""
