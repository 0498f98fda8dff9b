"""Files, bases, overrides and writing back."""

import dataclasses
import os
import subprocess
import sys

import pytest
import yaml

from mxjax.config import (
    Config,
    ConfigError,
    ModelConfig,
    RopeScalingConfig,
    load_config,
    load_settings,
    to_yaml,
)


@pytest.fixture
def write(tmp_path):
    def write(text, name="config.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def problem_of(path, overrides=()):
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    (problem,) = error.value.problems
    return problem


def test_file_holds_only_differences(write):
    config = load_config(write("model: {num_layers: 2}"))
    assert config == dataclasses.replace(Config(), model=ModelConfig(num_layers=2))


def test_section_with_all_lines_commented_out_is_default(write):
    assert load_config(write("model:\n  # num_layers: 2\n")) == Config()


def test_base_chain_merges_key_by_key_and_is_relative_to_the_file(write):
    write("model: {num_layers: 2, hidden_size: 64, rope_scaling: {factor: 2}}", "shared/root.yaml")
    write("base: root.yaml\nmodel: {num_layers: 3}\nrun_dir: a", "shared/middle.yaml")
    top = write("base: shared/middle.yaml\nmodel: {rope_scaling: {kind: linear}}\nrun_dir: b")
    config = load_config(top)
    assert config.model.num_layers == 3
    assert config.model.hidden_size == 64
    assert config.model.rope_scaling == RopeScalingConfig(factor=2, kind="linear")
    assert config.run_dir == "b"


def test_null_removes_what_the_base_sets(write):
    write("model: {rope_scaling: {factor: 2}}", "root.yaml")
    config = load_config(write("base: root.yaml\nmodel: {rope_scaling: null}"))
    assert config.model.rope_scaling is None


def test_one_anchor_used_twice_is_two_settings(write):
    config = load_config(
        write("data: {source: text, paths: &files [a], validation_paths: *files}"),
        ["data.paths=[b]"],
    )
    assert (config.data.paths, config.data.validation_paths) == (("b",), ("a",))


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
        ("optimizer.lr=1.5E3", "optimizer", "lr", 1500.0),
        ("optimizer.lr=2", "optimizer", "lr", 2.0),
        ("optimizer.no_decay=[a, b]", "optimizer", "no_decay", ("a", "b")),
        ("data.shuffle=false", "data", "shuffle", False),
        ("model.head_dim=null", "model", "head_dim", None),
        ("log.sample_prompt='a=b'", "log", "sample_prompt", "a=b"),
        ("log.sample_prompt=2024-01-01", "log", "sample_prompt", "2024-01-01"),
        ("model={num_layers: 7}", "model", "num_layers", 7),
        ("model.rope_scaling.factor=2", "model", "rope_scaling", RopeScalingConfig(factor=2)),
    ],
)
def test_override_value_is_yaml(write, override, section, key, value):
    config = load_config(write("{}"), [override])
    assert getattr(getattr(config, section), key) == value


def test_overrides_beat_the_file_and_the_last_one_wins(write):
    path = write("model: {num_layers: 2, hidden_size: 64}")
    config = load_config(path, ["model.num_layers=3", "model.num_layers=5"])
    assert (config.model.num_layers, config.model.hidden_size) == (5, 64)


@pytest.mark.parametrize(
    ("text", "path", "value", "words"),
    [
        ("", "config.yaml", None, "mapping"),
        ("# nothing\n", "config.yaml", None, "an empty file is written {}"),
        ("[1, 2]", "config.yaml", [1, 2], "mapping"),
        ("model:\n  a: [1\nb: 2\n", "config.yaml:3", "b: 2", "not valid YAML"),
        ("model:\n\tnum_layers: 2\n", "config.yaml:2", "\tnum_layers: 2", "not valid YAML"),
        ("run_dir: a\n--- \nrun_dir: b", "config.yaml:2", "--- ", "single document"),
        ("run_dir: !!python/name:os.system\n", "config.yaml", None, "not valid YAML"),
        ("run_dir: !!binary aGk=\n", "config.yaml", None, "not valid YAML"),
        ('run_dir: "a\\ud800"\n', "config.yaml", 'run_dir: "a\\ud800"\n', "surrogates not allowed"),
        ("model: &m {rope_scaling: *m}\n", "config.yaml", None, "Circular"),
        ("base: 5", "base", 5, "path of a YAML file"),
        ("base: gone.yaml", "base", "gone.yaml", "No such file"),
        ("base: config.yaml", "base", "config.yaml", "remove one `base`"),
    ],
)
def test_unusable_file_is_one_problem_that_names_it(write, text, path, value, words):
    file = write(text)
    problem = problem_of(file)
    assert problem.path.endswith(path)
    if value is not None and path != "base":
        assert problem.value == value
    assert words in problem.message
    assert file.name in problem.path + problem.origin


def test_missing_file_and_folder_are_named(tmp_path):
    for path, reason in [(tmp_path / "x.yaml", "No such file"), (tmp_path, "Is a directory")]:
        problem = problem_of(path)
        assert (problem.path, problem.value) == ("config", str(path))
        assert reason in problem.message


def test_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in problem_of(tmp_path / "x.yaml").message


def test_cycle_of_bases_names_the_files(write):
    write("base: config.yaml", "a.yaml")
    problem = problem_of(write("base: a.yaml"))
    assert problem.message.count("config.yaml") == 2
    assert "a.yaml" in problem.message


@pytest.mark.parametrize("override", ["model.num_layers", "=3", ".a=3", "a..b=3", "a b=3"])
def test_malformed_override_shows_the_form(write, override):
    problem = problem_of(write("{}"), [override])
    assert (problem.path, problem.value) == ("override", override)
    assert "optimizer.lr=3e-4" in problem.message


def test_override_with_broken_yaml_is_named(write):
    problem = problem_of(write("{}"), ["data.paths=[a"])
    assert (problem.path, problem.value) == ("data.paths", "[a")
    assert "not valid YAML" in problem.message


def test_base_is_refused_as_an_override(write):
    assert "into the YAML file" in problem_of(write("{}"), ["base=x.yaml"]).message


def test_malformed_overrides_are_reported_with_other_problems(write):
    with pytest.raises(ConfigError) as error:
        load_config(write("model: {num_layers: 0}"), ["oops", "parallel.ep=2"])
    assert [p.path for p in error.value.problems] == ["override", "model.num_layers", "parallel.ep"]


def test_key_set_twice_is_refused_with_both_places(write):
    problem = problem_of(write("model:\n  num_layers: 2\n  num_layers: 3\n"))
    assert (problem.path, problem.value) == ("model.num_layers", "3")
    assert "config.yaml:2" in problem.message
    assert problem.origin.endswith("config.yaml:3")


def test_problem_says_where_the_value_was_set(write):
    write("model:\n  num_layers: 0\n  hidden_size: 0\n", "root.yaml")
    top = write("base: root.yaml\nlog:\n  interval: 0\nmodel: {hidden_size: -1}\n")
    with pytest.raises(ConfigError) as error:
        load_config(
            top, ["data.prefetch=0", "training={num_steps: 0}", "parallel.ep=2", "remta.x=1"]
        )
    origins = {p.path: p.origin.rpartition("/")[2] for p in error.value.problems}
    assert origins == {
        "model.num_layers": "root.yaml:2",
        "model.hidden_size": "config.yaml:4",
        "log.interval": "config.yaml:3",
        "data.prefetch": "override data.prefetch=0",
        "training.num_steps": "override training={num_steps: 0}",
        "parallel.ep": "override parallel.ep=2",
        "remta": "override remta.x=1",
    }


def test_problem_of_an_unset_key_says_default(write):
    problem = problem_of(write("model: {max_position_embeddings: 128}"))
    assert (problem.path, problem.origin) == ("training.seq_length", "default")


ODD = [
    "run_dir='3e-4'",
    "data={source: jsonl, paths: [a], text_key: '1'}",
    "log.sample_prompt='yes: [no] # ünï\n'",
    "optimizer.eps=1e-20",
    "optimizer.lr=3e-4",
    "optimizer.no_decay=[]",
    "model.rope_scaling={factor: 2}",
    "log.profile_steps=[2, 3]",
    "moe.num_experts=4",
    "moe.capacity_buckets=[1.5]",
]


@pytest.mark.parametrize("only_differences", [False, True])
@pytest.mark.parametrize("overrides", [[], ODD])
def test_written_configuration_reads_back_equal(write, overrides, only_differences):
    config = load_config(write("{}"), overrides)
    text = to_yaml(config, only_differences)
    assert load_config(write(text, "copy.yaml")) == config


def test_differences_leave_out_defaults(write):
    config = load_config(write("model: {num_layers: 2}\noptimizer: {lr: 3e-4}"))
    assert yaml.safe_load(to_yaml(config, only_differences=True)) == {"model": {"num_layers": 2}}
    assert yaml.safe_load(to_yaml(config)).keys() == {f.name for f in dataclasses.fields(Config)}


def test_configuration_is_frozen():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run_dir = "x"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.num_layers = 2


def test_reading_a_configuration_does_not_import_jax(write):
    """`parallel.cpu_devices` must reach JAX before its first import."""
    code = (
        "import sys, mxjax.config as c; c.load_config(sys.argv[1]); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, os.fspath(write("{}"))], check=True, timeout=60)


def test_settings_without_a_file_are_checked_alike_and_name_their_origin():
    settings = {"model": {"num_layers": 0}, "moe": {"num_experts": 8}}
    with pytest.raises(ConfigError) as caught:
        load_settings(settings, "Megatron's arguments", ["moe.router_topk=9"])
    found = {problem.path: problem.origin for problem in caught.value.problems}
    assert found == {
        "model.num_layers": "Megatron's arguments",
        "moe.router_topk": "override moe.router_topk=9",
    }
    config = load_settings({"model": {"num_layers": 3}}, "Megatron's arguments", ["run_dir=x"])
    assert (config.model.num_layers, config.run_dir) == (3, "x")
