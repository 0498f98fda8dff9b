"""`pipeline.costs: measured`."""

import dataclasses
import json
from pathlib import Path

import pytest

from mxjax.config import load_settings
from mxjax.pipeline.simulate import Costs
from mxjax.training import layer_costs
from mxjax.training.layer_costs import measure_costs, with_costs
from mxjax.training.pipelined import PipelinedObjective
from mxjax.training.run_dir import RunDirError, write_config


@pytest.fixture
def config(small_config, tmp_path):
    config = small_config(
        "deepseek",
        model={"num_layers": 4},
        parallel={"pp": 2, "ep": 2},
        pipeline={"schedule": "zbh1", "costs": "measured"},
        training={"num_microbatches": 4, "global_batch_size": 8},
    )
    return dataclasses.replace(config, run_dir=str(tmp_path))


@pytest.fixture
def measured(monkeypatch):
    """Costs in place of measured ones, and how often they were asked for."""
    calls = []

    def measure(objective, stagewise):
        calls.append(objective)
        return Costs(F=2.0, B=3.00001, W=1.0)

    monkeypatch.setattr(layer_costs, "measure_costs", measure)
    return calls


def test_a_configuration_may_leave_them_to_be_measured():
    """Its rules take the default meanwhile."""
    settings = {
        "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4},
        "parallel": {"pp": 2, "dp": 1},
        "training": {"num_microbatches": 4, "global_batch_size": 4},
        "pipeline": {"costs": "measured", "schedule": "zbh1", "max_activations": 4},
    }
    assert load_settings(settings, "test").pipeline.costs == "measured"


@pytest.mark.parametrize("stagewise", [False, True])
def test_every_kind_of_layer_is_timed_with_the_collectives_in_it(config, mesh_of, stagewise):
    costs = measure_costs(PipelinedObjective(config, mesh_of(config)), stagewise)
    assert min(costs.F, costs.B, costs.W, costs.BW) > 0


def test_numbers_take_the_place_of_the_word(config, mesh_of, measured):
    found = with_costs(config, mesh_of(config))
    assert found.pipeline.costs == (2.0, 3.0, 1.0, 4.0)
    assert len(measured) == 1
    assert with_costs(found, mesh_of(config)) is found, "numbers are left alone"


def test_a_run_that_resumes_takes_those_that_it_began_with(config, mesh_of, measured):
    costs = with_costs(config, mesh_of(config)).pipeline.costs
    longer = dataclasses.replace(config.training, num_steps=config.training.num_steps + 1)
    resumed = dataclasses.replace(config, training=longer)
    assert with_costs(resumed, mesh_of(config)).pipeline.costs == costs
    assert len(measured) == 1


def test_what_was_never_measured_is(config, mesh_of, measured):
    """A run before had numbers of its own, which its folder has too."""
    given = dataclasses.replace(config.pipeline, costs=(1.0, 2.0, 3.0))
    before = dataclasses.replace(config, pipeline=given)
    write_config(with_costs(before, mesh_of(config)), Path(config.run_dir))
    assert with_costs(config, mesh_of(config)).pipeline.costs == (2.0, 3.0, 1.0, 4.0)


@pytest.mark.parametrize(
    ("section", "change"),
    [("model", {"ffn_hidden_size": 96}), ("kernels", {"implementation": "xla"})],
)
def test_another_layer_is_measured_anew(config, mesh_of, measured, section, change):
    with_costs(config, mesh_of(config))
    changed = dataclasses.replace(getattr(config, section), **change)
    with_costs(dataclasses.replace(config, **{section: changed}), mesh_of(config))
    assert len(measured) == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1, 2",
        "[1, 2, 3]",
        "[1, 0, 2, 3]",
        '"x"',
        "{}",
        "[Infinity, 1, 1, 1]",
        "[1e40, 1, 1, 1]",
    ],
)
def test_a_broken_file_is_measured_anew(config, mesh_of, measured, content):
    costs = with_costs(config, mesh_of(config)).pipeline.costs
    (file,) = Path(config.run_dir).glob("layer_costs_*.json")
    file.write_text(content)
    assert with_costs(config, mesh_of(config)).pipeline.costs == costs
    assert len(measured) == 2
    assert json.loads(file.read_text()) == list(costs)


def test_a_folder_that_cannot_be_written_is_named(config, mesh_of, measured, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="run_dir: cannot write"):
        with_costs(dataclasses.replace(config, run_dir=str(tmp_path / "file")), mesh_of(config))
