"""Errors of reading checkpoints that others wrote."""


class CheckpointFormatError(ValueError):
    """A file or folder that is not a checkpoint, is damaged, or is of a kind that is not read."""


class ExportError(CheckpointFormatError):
    """A run that another program's format, or the layout asked for, cannot hold."""
