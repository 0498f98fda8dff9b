"""Choosing capacity buckets: up at once, down with patience, and the same after a resume."""

import json
import math
import random
import re
from pathlib import Path

import pytest

import mxjax
from mxjax.moe.buckets import MARGIN, PATIENCE, BucketChooser

BUCKETS = (1.25, 2.0, 4.0)


def run(chooser, needs):
    """The buckets that steps with these needs run in, rejected tries included."""
    used = []
    for needed in needs:
        used.append(chooser.current)
        if needed > chooser.current:
            chooser.overflowed(needed)
            used.append(chooser.current)
        chooser.fitted(needed)
    return used


def test_overflow_takes_the_smallest_bucket_that_holds_the_need():
    chooser = BucketChooser(BUCKETS)
    assert chooser.current == 1.25
    assert chooser.next_larger == 2.0
    chooser.overflowed(2.5)
    assert chooser.current == 4.0
    chooser.overflowed(7.0)
    assert chooser.current == math.inf
    assert chooser.next_larger is None


def test_without_buckets_nothing_can_overflow():
    chooser = BucketChooser(())
    assert run(chooser, [1.0, 100.0]) == [math.inf, math.inf]


def test_a_smaller_bucket_comes_one_at_a_time_after_steps_that_would_have_fitted():
    chooser = BucketChooser(BUCKETS)
    chooser.overflowed(3.0)
    used = run(chooser, [1.0] * (2 * PATIENCE + 1))
    assert used == [4.0] * PATIENCE + [2.0] * PATIENCE + [1.25]


@pytest.mark.parametrize(
    ("peak", "bucket"), [(2.0 / MARGIN - 0.01, 2.0), (2.0 / MARGIN + 0.01, 4.0)]
)
def test_a_load_near_the_border_does_not_go_down(peak, bucket):
    """One step in the last `PATIENCE` that would have left too little room is enough."""
    chooser = BucketChooser(BUCKETS)
    chooser.overflowed(3.0)
    run(chooser, [1.0] * (PATIENCE // 2) + [peak] + [1.0] * (PATIENCE // 2))
    assert chooser.current == bucket


def test_an_overflow_starts_the_wait_anew():
    chooser = BucketChooser(BUCKETS)
    chooser.overflowed(1.5)
    run(chooser, [1.0] * (PATIENCE - 1))
    chooser.overflowed(3.0)
    run(chooser, [1.0] * (PATIENCE - 1))
    assert chooser.current == 4.0


@pytest.mark.parametrize("seed", range(5))
def test_a_resumed_chooser_goes_on_as_the_uninterrupted_one(seed):
    """Interrupted after each step and restored from JSON."""
    rng = random.Random(seed)
    # Quiet stretches and loud ones, so that it goes up and down.
    needs = [
        rng.uniform(1.0, rng.choice([1.1, 1.1, 5.0]) if i % 60 < 9 else 1.1) for i in range(400)
    ]
    whole, used = run(BucketChooser(BUCKETS), needs), []
    saved = BucketChooser(BUCKETS).as_dict()
    for needed in needs:
        chooser = BucketChooser(BUCKETS)
        chooser.restore(json.loads(json.dumps(saved)))
        used += run(chooser, [needed])
        saved = chooser.as_dict()
    assert used == whole
    assert len(set(used)) > 2, "the needs do not exercise the buckets"


def test_a_bucket_that_is_not_configured_any_more_is_forgotten():
    chooser = BucketChooser((1.5, 3.0))
    chooser.restore({"bucket": 2.0, "recent": [1.0] * (PATIENCE - 1)})
    assert chooser.current == 1.5
    chooser.overflowed(2.0)
    assert run(chooser, [1.0] * PATIENCE) == [3.0] * PATIENCE


def test_nothing_calls_ragged_dot():
    """It computes every expert for every token on NVIDIA GPUs."""
    for path in Path(mxjax.__file__).parent.rglob("*.py"):
        assert not re.search(r"ragged_dot|ragged_all_to_all", path.read_text()), path
