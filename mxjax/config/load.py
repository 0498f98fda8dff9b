"""Reading a configuration: a YAML file, its bases and overrides in, a validated ``Config`` out.

Everything that is wrong is collected and raised as one ``ConfigError``. Types and single values are
judged by pydantic, whose errors are put into plain words here; what involves several fields is
judged by ``checks.py`` on a copy in which refused values are replaced by defaults, so that both
kinds of problem are reported together.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from mxjax.config.checks import Problem, cross_problems, resolve_axes
from mxjax.config.schema import Config, ParallelConfig

_CONFIG = TypeAdapter(Config)


class ConfigError(ValueError):
    """A configuration that cannot be used.

    Attributes:
      problems: everything that is wrong, one line of the message each.
    """

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"The configuration has {count}:", *(f"  {problem}" for problem in problems)]
        super().__init__("\n".join(lines))


def load_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    device_count: Callable[[ParallelConfig], int] | None = None,
) -> Config:
    """Reads and validates a configuration.

    Args:
      path: YAML file with what differs from the defaults, and from its ``base`` file if it names
        one.
      overrides: ``section.key=value``, the value in YAML; the last one wins.
      device_count: number of devices of the whole run under the given ``parallel`` section. Called
        at most once, and only if that section is sound. None: not known; the axis of size -1 stays
        and nothing is checked against the number of devices.

    Raises:
      ConfigError: with all problems. While a file cannot be read, only that is reported.
    """
    return _load(_read_file(Path(path)), overrides, device_count)


def load_settings(
    settings: Mapping[str, Any],
    origin: str,
    overrides: Sequence[str] = (),
    device_count: Callable[[ParallelConfig], int] | None = None,
) -> Config:
    """As `load_config`, from sections as plain dicts; `origin` says in messages where they are
    from."""
    values = json.loads(json.dumps(settings))
    layer = _Layer(values, dict.fromkeys(values, origin))
    return _load([layer], overrides, device_count)


def _load(
    layers: list[_Layer],
    overrides: Sequence[str],
    device_count: Callable[[ParallelConfig], int] | None,
) -> Config:
    layers = [*layers, *(_read_override(override) for override in overrides)]
    tree: dict = {}
    origins: dict[str, str] = {}
    for layer in layers:
        _merge(tree, layer.values)
        origins |= layer.origins

    config, problems, bad_fields = _validate(tree)
    if not any(f"{bad}.".startswith("parallel.") for bad in bad_fields):
        num_devices = device_count(config.parallel) if device_count else None
        parallel, axis_problems = resolve_axes(config.parallel, num_devices)
        config = replace(config, parallel=parallel)
        problems += axis_problems
    problems += cross_problems(config, bad_fields)
    problems = [replace(problem, origin=_origin(problem.path, origins)) for problem in problems]
    problems = [problem for layer in layers for problem in layer.problems] + problems
    if problems:
        raise ConfigError(problems)
    return config


def to_yaml(config: Config, only_differences: bool = False) -> str:
    """Writes a configuration as YAML that ``load_config`` reads back as the same configuration.

    Args:
      config: the configuration.
      only_differences: leave out what equals the defaults.
    """
    values = _CONFIG.dump_python(config, mode="json")
    if only_differences:
        values = _differences(values, _CONFIG.dump_python(Config(), mode="json"))
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _differences(values: dict, defaults: dict) -> dict:
    result = {}
    for key, value in values.items():
        if value == defaults[key]:
            continue
        both_mappings = isinstance(value, dict) and isinstance(defaults[key], dict)
        result[key] = _differences(value, defaults[key]) if both_mappings else value
    return result


# YAML


class _Loader(yaml.SafeLoader):
    """YAML with JSON's types only: 3e-4 is a number, a date is text, anything else is refused."""


_JSON_TAGS = ("null", "bool", "int", "float", "str", "seq", "map", "merge")
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix("tag:yaml.org,2002:") in _JSON_TAGS
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1, which PyYAML follows, takes 3e-4 for text because it has no dot and no signed exponent.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


class _Dumper(yaml.SafeDumper):
    """Quotes what ``_Loader`` would take for something else, and keeps lists on one line."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


_Dumper.add_representer(
    list,
    lambda dumper, items: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", items, flow_style=True
    ),
)


@dataclass
class _Layer:
    """Settings from one file or one override, and where each of them stands."""

    values: dict = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def _parse(text: str) -> tuple[object, yaml.Node | None]:
    """Returns the value of a YAML document and its nodes, which know their lines."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()
    # Through JSON: keys become text, and anchors become copies that can be changed one by one.
    # Through UTF-8: half of a surrogate pair, which YAML can escape, is no text.
    return json.loads(json.dumps(value, ensure_ascii=False).encode()), node


def _read_file(path: Path, readers: tuple[Path, ...] = (), named_at: str = "") -> list[_Layer]:
    """Reads a file after its bases.

    `readers` are the files that led here through their `base`, the last of them at `named_at`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        key, folder = (
            ("base", "the file that names it") if readers else ("config", "the current folder")
        )
        message = f"cannot be read ({reason}); name a YAML file, relative to {folder}"
        raise ConfigError([Problem(key, str(path), message, named_at)]) from error
    try:
        values, node = _parse(text)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([_broken_yaml(error, text, str(path))]) from error
    if not isinstance(values, dict):
        message = "must be a mapping such as `model: {num_layers: 2}`; an empty file is written {}"
        raise ConfigError([Problem(str(path), values, message)])

    layer = _Layer(values)
    _note_origins(node, "", lambda key: f"{path}:{key.start_mark.line + 1}", layer)
    for section in _SECTIONS.keys() & values.keys():
        if values[section] is None and "." not in section:
            values[section] = {}  # all of its lines are commented out
    base = values.pop("base", None)
    origin = layer.origins.pop("base", None)
    if origin is None:
        return [layer]
    return [*_read_base(base, origin, path, readers), layer]


def _read_base(base: object, origin: str, path: Path, readers: tuple[Path, ...]) -> list[_Layer]:
    if not isinstance(base, str):
        message = "must be the path of a YAML file, relative to this one"
        raise ConfigError([Problem("base", base, message, origin)])
    base_path = Path(os.path.normpath(path.parent / base))
    chain = (*readers, path)
    if base_path.resolve() in [reader.resolve() for reader in chain]:
        names = " -> ".join(str(file) for file in (*chain, base_path))
        message = f"the files are based on each other ({names}); remove one `base`"
        raise ConfigError([Problem("base", base, message, origin)])
    return _read_file(base_path, chain, origin)


def _read_override(override: str) -> _Layer:
    path, equals, text = override.partition("=")
    keys = path.split(".")
    origin = f"override {override}"
    if not equals or not all(re.fullmatch(r"[\w-]+", key) for key in keys):
        message = "an override has the form section.key=value, such as optimizer.lr=3e-4"
        return _Layer(problems=[Problem("override", override, message)])
    if path == "base":
        message = "is read from files only; write it into the YAML file"
        return _Layer(problems=[Problem("base", text, message, origin)])
    try:
        value, node = _parse(text)
    except (yaml.YAMLError, ValueError) as error:
        return _Layer(problems=[_broken_yaml(error, text, path)])
    layer = _Layer({keys[-1]: value}, {path: origin})
    _note_origins(node, f"{path}.", lambda key: origin, layer)
    for key in reversed(keys[:-1]):
        layer.values = {key: layer.values}
    return layer


def _note_origins(
    node: yaml.Node | None, prefix: str, origin: Callable[[yaml.Node], str], layer: _Layer
) -> None:
    """Notes where each key stands, and keys that are set twice, of which YAML drops the first."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, str] = {}
    for key, value in node.value:
        path, where = f"{prefix}{key.value}", origin(key)
        if path in seen:
            shown = value.value if isinstance(value, yaml.ScalarNode) else None
            message = f"is set twice, first at {seen[path]}; keep one"
            layer.problems.append(Problem(path, shown, message, where))
        seen[path] = layer.origins[path] = where
        _note_origins(value, f"{path}.", origin, layer)


def _broken_yaml(error: Exception, text: str, where: str) -> Problem:
    """`where` is the file, or the path that an override sets."""
    context, reason = (getattr(error, name, None) for name in ("context", "problem"))
    reason = ", ".join(filter(None, (context, reason))) or str(error)
    mark, lines, shown = getattr(error, "problem_mark", None), text.splitlines(), text
    if mark is not None and len(lines) > 1:
        where = f"{where}:{mark.line + 1}"
        shown = lines[mark.line] if mark.line < len(lines) else "(end of file)"
    message = f"is not valid YAML ({reason}); check quotes, brackets and indentation"
    return Problem(where, shown, message)


def _merge(tree: dict, over: Mapping) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _origin(path: str, origins: Mapping[str, str]) -> str:
    """Where the field was set, or else what is inside it, or else the section around it."""
    path = path.partition("[")[0]
    inside = [origin for key, origin in origins.items() if key.startswith(f"{path}.")]
    if path not in origins and inside:
        return inside[-1]
    while path:
        if path in origins:
            return origins[path]
        path = path.rpartition(".")[0]
    return "default"


# Types and single values


def _find_sections(component: type, path: str = "") -> dict[str, type]:
    """The components of the tree by their path; the whole is at ``""``."""
    sections = {path: component}
    for name, hint in get_type_hints(component).items():
        for part in (hint, *get_args(hint)):
            if is_dataclass(part):
                sections |= _find_sections(part, f"{path}.{name}".lstrip("."))
    return sections


_SECTIONS = _find_sections(Config)


def _keys(section: str) -> list[str]:
    return [f.name for f in fields(_SECTIONS[section])]


def _validate(tree: dict) -> tuple[Config, list[Problem], set[str]]:
    """Checks each field by itself.

    Returns:
      The configuration with defaults in place of refused values, the problems, and the paths of
      the fields and sections whose value is not what the user meant.
    """
    try:
        # JSON mode is strict about types ("4" and true are no numbers) but takes lists for tuples.
        return _CONFIG.validate_json(json.dumps(tree), strict=True), [], set()
    except ValidationError as error:
        details = _of_fields(error.errors(include_url=False))
    problems, bad_fields = [], set()
    sound = json.loads(json.dumps(tree))
    for detail in details:
        keys = [part for part in detail["loc"] if isinstance(part, str)]
        path, value = ".".join(keys), detail["input"]
        bad_fields.add(path)
        if detail["type"] == "unexpected_keyword_argument":
            meant, message = _unknown_key(keys[-1], ".".join(keys[:-1]))
            bad_fields |= meant
        else:
            message = _plain_message(detail, path)
        if detail["type"] != "missing":  # an entry that is not there has no index
            steps = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"])
            path = "".join(steps).removeprefix(".")
        problems.append(Problem(path, value, message))
        _remove(sound, keys)
    return _CONFIG.validate_json(json.dumps(sound), strict=True), problems, bad_fields


def _of_fields(details: Sequence[Mapping]) -> list[Mapping]:
    """One error where a field takes a word or a list and pydantic tells what each of them lacks:
    for a list what is wrong in it, else what would be right. Only such errors have a place with a
    type in it, ``literal['auto']`` or ``tuple[...]``."""
    found = []
    for detail in details:
        types = [part for part in detail["loc"] if str(part).startswith(("literal[", "tuple["))]
        if types:
            for_word = types[0].startswith("literal")
            of_other = (
                isinstance(detail["input"], list) if for_word else detail["type"] == "tuple_type"
            )
            if of_other:  # what the other of the two says of this value is of more use
                continue
            detail = detail | {"loc": tuple(p for p in detail["loc"] if p not in types)}
            if for_word:
                detail["ctx"] = {"expected": f"{detail['ctx']['expected']} or a list"}
        found.append(detail)
    return found


def _remove(tree: dict, keys: Sequence[str]) -> None:
    """Removes a value, or the whole list that it is in."""
    *sections, last = keys
    for key in sections:
        if not isinstance(tree.get(key), dict):
            last = key
            break
        tree = tree[key]
    tree.pop(last, None)  # gone already if two entries of one list are wrong


def _unknown_key(key: str, section: str) -> tuple[set[str], str]:
    """Returns the paths of known keys that may have been meant, and the message.

    Those are the nearest name in the section, and the same name in other sections; if there is
    neither, the nearest name anywhere.
    """
    paths = [f"{where}.{name}".lstrip(".") for where in _SECTIONS for name in _keys(where)]
    names = [path.rpartition(".")[2] for path in paths]
    nearest = get_close_matches(key, _keys(section), n=1)
    meant = [f"{section}.{name}".lstrip(".") for name in nearest]
    meant += [path for path, name in zip(paths, names, strict=True) if name == key]
    if not meant:
        nearest = get_close_matches(key, names, n=1, cutoff=0.7)
        meant = [path for path, name in zip(paths, names, strict=True) if name in nearest]
    if meant:
        return set(meant), f"unknown key; did you mean {' or '.join(meant)}?"
    known = ", ".join(_keys(section))
    return set(), f"unknown key; use one of those of {section or 'the top level'}: {known}"


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def _plain_message(detail: Mapping, path: str) -> str:
    """Puts an error of pydantic into plain words with a way out."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    section, _, key = path.rpartition(".")
    default = getattr(_SECTIONS[section](), key)
    or_null = " or null" if default is None else ""
    if kind == "dataclass_type":
        return f"must be a mapping{or_null}; its keys are {', '.join(_keys(path))}"
    way_out = f"; the default is {json.dumps(default)}"
    if kind in _EXPECTED:
        expected = _EXPECTED[kind] + or_null
        if kind == "int_type" and isinstance(value, float) and value.is_integer():
            way_out = f"; write {int(value)}"
        elif kind == "string_type" and isinstance(value, int | float):
            way_out = f"; write {json.dumps(json.dumps(value))}"
        elif kind == "tuple_type" and isinstance(value, str | int | float):
            way_out = f"; write {json.dumps([value])}"
    elif kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        expected = f"{words} {context[bound]:g}{or_null}"
    elif kind == "literal_error":
        expected = context["expected"].replace("'", "") + or_null
    elif kind == "missing":
        expected = f"a list{or_null}, and has no entry {detail['loc'][-1] + 1}"
    elif kind == "too_long":
        expected = f"a list of {context['max_length']} entries{or_null}"
    else:
        return f"is not accepted ({detail['msg']}){way_out}"
    return f"must be {expected}{way_out}"
