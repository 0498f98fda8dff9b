"""The axis of size -1, and the sizes against the number of devices."""

import pytest

from mxjax.config import ConfigError, ParallelConfig, load_config, resolve_axes
from mxjax.config.checks import AXES
from mxjax.config.rules.data import BYTE_TOKENIZER_SIZE
from mxjax.data.tokenizer import ByteTokenizer
from mxjax.sharding import mesh


@pytest.fixture
def empty_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("{}")
    return path


@pytest.mark.parametrize(
    ("sizes", "num_devices", "axis", "size"),
    [
        ({}, 8, "dp", 8),
        ({"tp": 2, "ep": 2}, 8, "dp", 2),
        ({"tp": 8}, 8, "dp", 1),
        ({"dp": 2, "tp": -1}, 6, "tp", 3),
        ({"dp": 2, "ep": 4}, 8, "dp", 2),
    ],
)
def test_free_axis_takes_the_devices_that_the_others_leave(sizes, num_devices, axis, size):
    resolved, problems = resolve_axes(ParallelConfig(**sizes), num_devices)
    assert not problems
    assert getattr(resolved, axis) == size


def test_free_axis_stays_while_the_number_of_devices_is_unknown(empty_file):
    assert load_config(empty_file, ["parallel.tp=2"]).parallel.dp == -1


@pytest.mark.parametrize(
    ("sizes", "path", "words"),
    [
        ({"tp": 3}, "parallel.dp", ["parallel.tp", "3", "8 devices", "change"]),
        ({"tp": 16}, "parallel.dp", ["16", "8 devices"]),
        ({"dp": 2, "tp": 2}, "parallel", ["multiply to 4", "8 devices", "-1"]),
        ({"dp": 2, "cpu_devices": 8}, "parallel", ["8 devices", "parallel.cpu_devices"]),
    ],
)
def test_sizes_that_do_not_fit_name_the_number_of_devices_and_what_to_change(sizes, path, words):
    parallel = ParallelConfig(**sizes)
    resolved, (problem,) = resolve_axes(parallel, 8)
    assert resolved == parallel
    assert problem.path == path
    for word in words:
        assert word in problem.message


def test_all_broken_axes_are_named():
    _, problems = resolve_axes(ParallelConfig(pp=0, ep=-1, tp=-1), 8)
    assert [p.path for p in problems] == ["parallel.pp", "parallel.ep", "parallel.tp"]


def test_rules_see_the_resolved_size(empty_file):
    with pytest.raises(ConfigError, match=r"parallel\.dp \* .* \(5 \* 1 \* 1 = 5\); use 20"):
        load_config(empty_file, ["parallel.zero_stage=0"], device_count=lambda _: 5)


def test_devices_are_counted_once_and_only_for_a_sound_section(empty_file):
    calls = []

    def device_count(parallel):
        calls.append(parallel)
        return parallel.cpu_devices

    config = load_config(empty_file, ["parallel.cpu_devices=4"], device_count)
    assert config.parallel.dp == 4
    assert [parallel.cpu_devices for parallel in calls] == [4]
    with pytest.raises(ConfigError, match="cpu_devices"):
        load_config(empty_file, ["parallel.cpu_devices=many"], device_count)
    assert len(calls) == 1


def test_facts_known_twice_agree():
    """The configuration is read before JAX is imported, so it repeats two facts."""
    assert AXES == mesh.AXES
    assert ByteTokenizer.vocab_size == BYTE_TOKENIZER_SIZE
