"""Data: files or random tokens -> documents -> packed samples -> batches on a mesh.

Read in this order: ``sources`` and ``tokenizer`` (documents), ``store`` (the corpus as one array,
and its split), ``packing`` (sample i of the run), ``loader`` (batches), ``build`` (all of it from
a ``DataConfig``). ``docs/data.md`` is the user's view.
"""

from mxjax.data.build import Data, build_data
from mxjax.data.errors import DataError
from mxjax.data.loader import BatchLoader
from mxjax.data.packing import IGNORED_TARGET, Sample, Samples

__all__ = [
    "IGNORED_TARGET",
    "BatchLoader",
    "Data",
    "DataError",
    "Sample",
    "Samples",
    "build_data",
]
