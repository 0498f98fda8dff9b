"""The one exception of this package that is meant for the user's eyes."""


class DataError(ValueError):
    """The configured data cannot be used; the message names the key or file and the way out."""
