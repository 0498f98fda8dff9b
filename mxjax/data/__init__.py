"""Data: files or random tokens -> documents -> packed samples -> batches on a mesh.

Read in this order: ``sources`` and ``tokenizer`` (documents), ``store`` (the corpus as one array,
and its split) and ``indexed`` (the corpus on disk), ``packing`` (sample i of the run) and ``blend``
(of several corpora), ``loader`` (batches), ``build`` (samples from a ``DataConfig``).
``preprocess`` is the command line's. ``docs/data.md`` is the user's view.

``loader`` alone needs JAX and is not imported here: the command line starts many processes.
"""

from mxjax.data.build import Data, build_data
from mxjax.data.errors import DataError
from mxjax.data.packing import IGNORED_TARGET, Sample, Samples

__all__ = [
    "IGNORED_TARGET",
    "Data",
    "DataError",
    "Sample",
    "Samples",
    "build_data",
]
