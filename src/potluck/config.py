"""TOML to frozen dataclasses and back, with errors that name the path and the nearest valid key.

Knows no dataclass of its own: each lives beside its owner, and train/recipe.py joins them.
"""

import dataclasses
import difflib
import functools
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union, get_args, get_origin

import tomli_w

from potluck.errors import ConfigError

T = TypeVar("T")


def from_toml(cls: type[T], text: str, *, source: str, overrides: tuple[str, ...] = ()) -> T:
    """Reads a configuration; `source` says where the text is from."""
    return from_dict(cls, parse_toml(text, source=source, overrides=overrides))


def parse_toml(text: str, *, source: str, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Each override is `a.b=value`, the value written as in TOML; a bare word is a string."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid TOML: {error}.") from None
    for override in overrides:
        _override(data, override)
    return data


def from_dict(cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Builds a dataclass from plain data. A field without a default is required."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    gone: frozenset[str] = getattr(cls, "removed", frozenset())
    for key in data:
        if key not in fields and key not in gone:
            raise ConfigError(_unknown_key(_join(path, key), key, list(fields)))
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in data and not has_default:
            raise ConfigError(f"{_join(path, name)} is missing, and has no default.")
    values = {
        key: value if key in gone else _convert(hints[key], value, _join(path, key)) for key, value in data.items()
    }
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from None


def to_dict(config: Any) -> dict[str, Any]:
    """The reverse of from_dict. None is left out, since TOML has no word for it."""
    kind = {"kind": config.kind} if hasattr(type(config), "kind") else {}
    pairs = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    return kind | {name: _plain(value) for name, value in pairs if value is not None}


def to_toml(config: Any) -> str:
    return tomli_w.dumps(to_dict(config))


def removed(**sentences: str) -> Callable[[type[T]], type[T]]:
    """Refuse settings that a dataclass had in an earlier version, each with a sentence that says what to do instead.

    One that is off, or whose sentence is empty, is passed over: files of that version name every setting.
    """

    def decorate(cls: type[T]) -> type[T]:
        make = cls.__init__

        @functools.wraps(make)
        def init(self: T, **settings: Any) -> None:
            for name in sentences.keys() & settings.keys():
                if settings.pop(name) and sentences[name]:
                    raise ConfigError(sentences[name])
            make(self, **settings)

        setattr(cls, "__init__", init)  # noqa: B010
        setattr(cls, "removed", frozenset(sentences))  # noqa: B010
        return cls

    return decorate


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    return list(value) if isinstance(value, tuple) else value


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _unknown_key(path: str, key: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f" Did you mean {path.removesuffix(key)}{near[0]}?" if near else ""
    return f"There is no setting {path}.{hint} Valid here: {', '.join(sorted(valid))}."


def _override(data: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set takes NAME=VALUE, for example --set batch.size=64, not {override!r}.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, key = path.strip().split(".")
    for index, table in enumerate(tables):
        data = data.setdefault(table, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {override}: {'.'.join(tables[: index + 1])} is a value, not a table.")
    data[key] = value


def _convert(hint: Any, value: Any, path: str) -> Any:
    """One value to its declared type, without guessing: an int serves as a float, and nothing else changes type."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not type(None)]
        if len(options) == 1:
            return _convert(options[0], value, path)
        if not all(hasattr(option, "kind") for option in options):  # a word, or a list
            takes_list = isinstance(value, list)
            return _convert(next(o for o in options if (get_origin(o) is tuple) == takes_list), value, path)
        return _convert_variant(options, value, path)
    if origin is typing.Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{path} must be one of {', '.join(map(repr, get_args(hint)))}, not {value!r}.")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{path} must be a list, not {value!r}.")
        return tuple(_convert(get_args(hint)[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if hasattr(hint, "kind"):
        return _convert_variant([hint], value, path)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{path} is a table of settings, not a single value: {value!r}.")
        return from_dict(typing.cast("type[Any]", hint), value, path)
    if isinstance(value, int) and value.bit_length() > 64:
        raise ConfigError(f"{path} is a number of {len(str(value))} digits, and none is that large.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{path} must be {_WORDS.get(hint, hint)}, not {value!r}.")
    return value


def _convert_variant(options: list[Any], value: Any, path: str) -> Any:
    """`kind = "no_shard"`, or just the string "no_shard", chooses the dataclass whose `kind` that is."""
    table = {"kind": value} if isinstance(value, str) else value
    by_name = {option.kind: option for option in options}
    if not isinstance(table, dict) or "kind" not in table:
        raise ConfigError(f"{path} needs a kind, one of {', '.join(by_name)}.")
    kind = table["kind"]
    if kind not in by_name:
        raise ConfigError(_unknown_key(f"{path} of kind {kind}", str(kind), list(by_name)))
    return from_dict(by_name[kind], {key: item for key, item in table.items() if key != "kind"}, path)


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def checked(make: Callable[[], T], what: str = "") -> T:
    """Whatever a setting is refused for, as a sentence for the command line."""
    try:
        return make()
    except ValueError as error:
        raise ConfigError(f"{what}{error}.") from None
