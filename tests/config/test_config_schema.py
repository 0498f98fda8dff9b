"""What is generated from the tree, and the configurations that come with the project."""

import os
from math import prod
from pathlib import Path

import pytest

from mxjax.config import Config, load_config, to_yaml
from mxjax.config.checks import AXES
from mxjax.config.json_schema import (
    REFERENCE_FILE,
    SCHEMA_FILE,
    json_schema,
    reference_text,
    schema_text,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "text"), [(SCHEMA_FILE, schema_text), (REFERENCE_FILE, reference_text)]
)
def test_generated_file_is_up_to_date(file, text):
    assert (ROOT / file).read_text(encoding="utf-8") == text(), (
        "run `python -m mxjax.config.json_schema` in the root of the repository"
    )


def test_schema_allows_base_and_refuses_unknown_keys():
    schema = json_schema()
    assert schema["properties"]["base"]["type"] == "string"
    components = [schema, *schema["$defs"].values()]
    assert all(component["additionalProperties"] is False for component in components)


def test_every_key_is_described():
    schema = json_schema()
    for component in schema["$defs"].values():
        for key, prop in component["properties"].items():
            assert prop.get("description"), key


def test_reference_lists_every_key():
    lines = reference_text().splitlines()
    for line in to_yaml(Config()).splitlines():
        key, _, value = line.strip().partition(":")
        if value:
            assert any(row.startswith(f"| `{key}` |") for row in lines), key


def fewest_devices(parallel):
    return parallel.cpu_devices or prod(max(1, getattr(parallel, axis)) for axis in AXES)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.yaml")))
def test_shipped_configuration_loads_and_names_the_schema(file):
    first = file.read_text(encoding="utf-8").splitlines()[0]
    relative = os.path.relpath(ROOT / SCHEMA_FILE, file.parent)
    assert first == f"# yaml-language-server: $schema={relative}"
    load_config(file, device_count=fewest_devices)
