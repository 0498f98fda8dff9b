"""Made from the configuration tree: a JSON schema for editors and a reference for people.

``python -m mxjax.config.json_schema``, run in the root of the repository, writes
``configs/schema.json`` and ``docs/configuration_reference.md`` anew.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from mxjax.config.schema import Config

SCHEMA_FILE = Path("configs/schema.json")
REFERENCE_FILE = Path("docs/configuration_reference.md")

_REFERENCE_HEAD = """\
# Configuration reference

Every key, generated from `mxjax/config/schema.py` by `python -m mxjax.config.json_schema`.
[configuration.md](configuration.md) says how files, overrides and errors work.
"""


class _WithoutTitles(GenerateJsonSchema):
    """A key's title would only repeat its name."""

    def field_title_should_be_set(self, schema) -> bool:
        return False


def json_schema() -> dict:
    """The JSON schema of a configuration file, which may also name a ``base`` file."""
    schema = TypeAdapter(Config).json_schema(schema_generator=_WithoutTitles)
    base = {"type": "string", "description": "File that this one differs from, relative to it."}
    schema["properties"] = {"base": base, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_text() -> str:
    """The content of ``configs/schema.json``."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def reference_text() -> str:
    """The content of ``docs/configuration_reference.md``: one table per section."""
    schema = json_schema()
    parts = [_REFERENCE_HEAD, _table("Top level", schema, schema["$defs"])]
    return "\n".join(parts)


def _table(heading: str, component: dict, components: dict) -> str:
    """A table of the component's plain keys, then one for each component inside it."""
    rows, nested = [], []
    for key, prop in component["properties"].items():
        inner = _component_name(prop)
        if inner is not None:
            path = key if heading == "Top level" else f"{heading.strip('`')}.{key}"
            nested.append(_table(f"`{path}`", components[inner], components))
        if inner is None or "description" in prop:
            description = " ".join(prop["description"].split()).replace("|", r"\|")
            default = f"`{json.dumps(prop['default'])}`" if "default" in prop else ""
            rows.append(f"| `{key}` | {_values(prop)} | {default} | {description} |")
    head = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    text = [f"## {heading}", "", " ".join(component["description"].split()), "", *head, *rows, ""]
    return "\n".join(text + nested)


def _component_name(prop: dict) -> str | None:
    for option in (prop, *prop.get("anyOf", ()), prop.get("items", {})):
        if "$ref" in option:
            return option["$ref"].rpartition("/")[2]
    return None


def _values(prop: dict) -> str:
    """Names the values a key may have, in words."""
    if "anyOf" in prop:
        return " or ".join(_values(option) for option in prop["anyOf"])
    if "enum" in prop:
        return ", ".join(f"`{value}`" for value in prop["enum"])
    if "const" in prop:
        return f"`{prop['const']}`"
    if "$ref" in prop:
        return "section"
    if "prefixItems" in prop:
        return "list of " + ", ".join(_values(item) for item in prop["prefixItems"])
    if "items" in prop:
        return "list of: " + _values(prop["items"])
    name = {"integer": "integer", "number": "number", "boolean": "`true`, `false`"}
    name |= {"string": "text", "null": "`null`"}
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {prop[bound]:g}" for bound, sign in signs.items() if bound in prop]
    return " ".join([name[prop["type"]], ", ".join(bounds)]).strip()


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    REFERENCE_FILE.write_text(reference_text(), encoding="utf-8")
