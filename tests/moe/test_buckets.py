"""Choosing capacity buckets."""

import math

from mxjax.moe.buckets import BucketChooser


def test_overflow_takes_the_smallest_bucket_that_holds_the_need():
    chooser = BucketChooser((1.25, 2.0, 4.0))
    assert chooser.current == 1.25
    assert chooser.next_larger == 2.0
    chooser.overflowed(2.5)
    assert chooser.current == 4.0
    chooser.overflowed(7.0)
    assert chooser.current == math.inf
    assert chooser.next_larger is None
