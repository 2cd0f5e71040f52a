"""Settings: frozen structs whose field types declare the allowed values.

A `Settings` checks and converts its fields when it is created, so an instance is always
valid. `settings_from` creates one from a table of TOML or from keyword arguments. All
errors have the form `key = value: expected ...`, and name every invalid field.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from numbers import Real
from pathlib import PurePath
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import FieldInfo, fields, force_setattr

from jdag.errors import ScenarioError, meant, unusable
from jdag.gone import GONE_SETTINGS

P = ParamSpec("P")
_SettingsT = TypeVar("_SettingsT", bound="Settings")
_Result = TypeVar("_Result")

_SHOWN_MAX = 10  # Number of invalid values that an error names.
_PLAIN: tuple[Any, ...] = (bool, int, float, str)
_LISTS = (tuple, list, Sequence)
_NOUNS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def is_number(value: Any) -> bool:
    """Whether a value is a real number or a real array of rank 0, but not a bool."""
    if not isinstance(value, Real) and getattr(value, "ndim", None) != 0:
        return False
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return type(value) is not bool and kind in "iufV"  # V: bfloat16 and others.


def is_listed(value: object) -> bool:
    if isinstance(value, str | bytes | bytearray | set | frozenset | Mapping):
        return False
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def is_path(value: object) -> bool:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return isinstance(text, str) and text != "" and "\0" not in text


def where(is_usable: Callable[[Any], bool], allowed: str) -> Meta:
    return Meta(description=allowed, extra={"is_usable": is_usable})


def reads(read: Callable[[Any], Any], allowed: str) -> Meta:
    """Return metadata of a type: a conversion, and its description in errors.

    `read` returns None or raises ValueError for invalid values.
    """
    return Meta(description=allowed, extra={"read": read})


def one_of(*names: str) -> Meta:
    return where(lambda value: value in names, f"one of {', '.join(names)}")


def are_different(values: Sequence[Any]) -> bool:
    return len(dict.fromkeys(values)) == len(values)


NS_MAX = (1 << 63) - 1  # 292 years.
NESTING_MAX = 200  # Default depth of programs that call programs.

NS = Annotated[int, Meta(ge=0, le=NS_MAX, description="an integer >= 0 and < 2^63")]
TEXT = Annotated[str, Meta(min_length=1)]
COUNT = Annotated[int, Meta(ge=1)]
NATURAL = Annotated[int, Meta(ge=0)]
NESTING = Annotated[int, Meta(ge=1, le=4000)]
PATH = Annotated[Any, where(is_path, "the path of a file or folder")]
TABLE = dict[str, Any]


class Settings(Struct, frozen=True):
    """Base of all settings.

    Raises:
        ScenarioError: fields are invalid, or valid but contradict each other.
    """

    def __post_init__(self) -> None:
        problems: list[str] = []
        for field in fields_of(type(self)):
            value = getattr(self, field.name)
            if value is field.default:
                continue
            try:
                result = converted(field.type, value, field.name)
            except ScenarioError as error:
                problems += error.args
            else:
                if result is not value:
                    force_setattr(self, field.name, result)
        _refuse(problems)
        _refuse([*self.contradictions()])

    def contradictions(self) -> Iterator[str]:
        return iter(())


fields_of: Callable[[type[Settings]], tuple[FieldInfo, ...]] = cache(fields)


def settings_from(
    kind: type[_SettingsT], table: Any, key: str = "", /, **given: Any
) -> _SettingsT:
    """Create settings from `table` and `given`. Errors name the table by `key`.

    Raises:
        ScenarioError: a key is unknown or missing, or values are invalid.
    """
    if not isinstance(table, Mapping):
        raise ScenarioError(unusable(key, table, "a table"))
    prefix = f"{key}." if key else ""
    known = [field for field in fields_of(kind) if field.name not in given]
    names = [field.name for field in known]
    for name, value in table.items():
        if name not in names:
            allowed = f"one of the keys {', '.join(names)}{meant(str(name), names)}"
            raise ScenarioError(unusable(f"{prefix}{name}", value, allowed))
    for field in known:
        if field.required and field.name not in table:
            raise ScenarioError(f"{prefix}{field.name} is missing; it is required")
    with under(key):
        return kind(**table, **given)


@contextmanager
def under(key: str) -> Iterator[None]:
    try:
        yield
    except ScenarioError as error:
        prefix = f"{key}." if key else ""
        raise ScenarioError(*[f"{prefix}{each}" for each in error.args]) from None


def part(kind: type[_SettingsT], *sources: Struct, **values: Any) -> _SettingsT:
    inherited = {
        name: getattr(source, name)
        for source in sources
        for name in kind.__struct_fields__
        if hasattr(source, name)
    }
    return kind(**{**inherited, **values})


def converted(kind: Any, value: Any, key: str) -> Any:
    """Convert a value to a type, for example a list to a tuple.

    Raises:
        ScenarioError: the value is invalid; the text begins with the key.
    """
    base, allowed, is_usable, read = _declared(kind)
    origin = get_origin(base)
    result = value
    if read is not None:
        result = None
        with suppress(TypeError, ValueError):
            result = value if _is_instance(value, base) else read(value)
        if result is None:
            raise ScenarioError(unusable(key, value, allowed))
    elif origin in (Union, UnionType):
        result = _one_of(get_args(base), value, key, allowed)
    elif isinstance(base, type) and issubclass(base, Settings):
        if not isinstance(value, base):
            if not isinstance(value, Mapping):
                raise ScenarioError(unusable(key, value, allowed))
            result = settings_from(base, value, key)
    elif origin in (dict, Mapping):
        result = _mapped(get_args(base), value, key, allowed)
    elif origin in _LISTS:
        result = _listed(base, value, key, allowed)
    elif base in _PLAIN:
        result = _plain(kind, base, value, key, allowed)
    elif base is not Any and not _is_instance(value, origin or base):
        try:
            result = convert(value, base, dec_hook=_path)
        except (ValidationError, TypeError):
            raise ScenarioError(unusable(key, value, allowed)) from None
    if is_usable is not None and not is_usable(result):
        raise ScenarioError(unusable(key, value, allowed))
    return result


def _path(kind: Any, value: Any) -> Any:
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    raise TypeError(kind)


def _is_instance(value: Any, kind: Any) -> bool:
    return isinstance(kind, type) and isinstance(value, kind)


def _plain(kind: Any, base: Any, value: Any, key: str, allowed: str) -> Any:
    try:
        number = float(value) if base is float and is_number(value) else value
        return convert(number, kind)
    except ValidationError:
        raise ScenarioError(unusable(key, value, allowed)) from None


def _one_of(kinds: tuple[Any, ...], value: Any, key: str, allowed: str) -> Any:
    """Convert a value to the first of these types that accepts it.

    If the types are tagged classes, a table becomes the class of its tag.
    """
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    if isinstance(value, Mapping) and (tags := _tags(others)):
        field = others[0].__struct_config__.tag_field
        names = f"one of {', '.join(tags)}"
        if field not in value:
            raise ScenarioError(f"{key}.{field} is missing: expected {names}")
        tag = value[field]
        if not isinstance(tag, str) or tag not in tags:
            raise ScenarioError(unusable(f"{key}.{field}", tag, names))
        rest = {name: each for name, each in value.items() if name != field}
        return settings_from(tags[tag], rest, key)
    inner = None
    for kind in others:
        try:
            return converted(kind, value, key)
        except ScenarioError as error:
            if not str(error).startswith(f"{key} = "):
                inner = inner or error  # The type fits, but not a part of the value.
    raise inner or ScenarioError(unusable(key, value, allowed))


def _tags(kinds: Sequence[Any]) -> dict[str, Any]:
    configs = [getattr(kind, "__struct_config__", None) for kind in kinds]
    tags: list[Any] = [getattr(config, "tag", None) for config in configs]
    return {} if None in tags else dict(zip(tags, kinds, strict=True))


def _mapped(kinds: tuple[Any, ...], value: Any, key: str, allowed: str) -> Any:
    if not isinstance(value, Mapping):
        raise ScenarioError(unusable(key, value, allowed))
    result: dict[Any, Any] = {}
    problems: list[str] = []
    for name, each in value.items():
        try:
            result_name = converted(kinds[0], name, f"{key}: name")
            inner = f".{name}" if isinstance(name, str) else f"[{name!r}]"
            result[result_name] = converted(kinds[1], each, f"{key}{inner}")
        except ScenarioError as error:
            problems += error.args
    _refuse(problems)
    return result


def _listed(kind: Any, value: Any, key: str, allowed: str) -> Any:
    if not is_listed(value):
        raise ScenarioError(unusable(key, value, allowed))
    values, kinds = tuple(value), get_args(kind)
    if len(kinds) == 1 or kinds[-1] is ...:
        kinds = (kinds[0],) * len(values)
    if len(kinds) != len(values):
        raise ScenarioError(unusable(key, value, allowed))
    items: list[Any] = []
    problems: list[str] = []
    for index, (each, item) in enumerate(zip(kinds, values, strict=True)):
        try:
            items.append(converted(each, item, f"{key}[{index}]"))
        except ScenarioError as error:
            problems += error.args
    _refuse(problems)
    return items if get_origin(kind) is list else tuple(items)


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ScenarioError(*problems[:_SHOWN_MAX])


@cache
def _declared(kind: Any) -> tuple[Any, str, Any, Any]:
    base, *metas = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    words = [meta.description for meta in metas if meta.description]
    extra = {key: each for meta in metas for key, each in (meta.extra or {}).items()}
    allowed = words[-1] if words else _words(base, metas)
    return base, allowed, extra.get("is_usable"), extra.get("read")


def _words(base: Any, metas: Sequence[Meta]) -> str:
    origin = get_origin(base)
    if origin in (Union, UnionType):
        kinds = [kind for kind in get_args(base) if kind is not NoneType]
        if _tags(kinds):
            names = ", ".join([kind.__name__ for kind in kinds])
            return f"one of {names}, or a table with its kind"
        return " or ".join([_declared(kind)[1] for kind in kinds])
    if origin in _LISTS:
        return "a list"
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(base)))}"
    if not isinstance(origin or base, type):
        return str(base).removeprefix("typing.")
    name = (origin or base).__name__
    if origin in (dict, Mapping) or name.endswith("Table"):
        return "a table"
    noun = _NOUNS.get(base, f"{'an' if name[0] in 'AEIO' else 'a'} {name}")
    if issubclass(origin or base, Settings):
        return f"{noun}, or a table of its keys"
    bounds = [meta for meta in metas if meta.ge is not None or meta.gt is not None]
    if not bounds:
        return noun
    low, most = bounds[0].ge, bounds[0].le
    if low is None:
        noun = f"{noun} above {bounds[0].gt:,}"
        return noun if most is None else f"{noun} and at most {most:,}"
    return f"{noun} >= {low}" if most is None else f"{noun} from {low:,} to {most:,}"


def takes(
    kind: Callable[P, Settings],
) -> Callable[[Callable[[Any], _Result]], Callable[P, _Result]]:
    """Return a decorator for a function of settings: callers pass their fields.

    The decorator checks the fields, and calls the function with the settings.
    """

    def decorate(function: Callable[[Any], _Result]) -> Callable[P, _Result]:
        names = [field.name for field in fields_of(kind)]  # type: ignore[arg-type]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> _Result:
            for name in kwargs:
                if name in GONE_SETTINGS:
                    raise ScenarioError(f"{name} was removed: {GONE_SETTINGS[name]}")
                if name not in names:
                    raise ScenarioError(
                        f"{function.__name__} has no setting {name}: expected one "
                        f"of {', '.join(names)}{meant(name, names)}"
                    )
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}: {error}") from None
            return function(kind(*args, **kwargs))

        hints = get_type_hints(kind)
        signature = inspect.signature(kind)
        parameters = [
            parameter.replace(annotation=hints[parameter.name])
            for parameter in signature.parameters.values()
        ]
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters,
            return_annotation=inspect.signature(function).return_annotation,
        )
        return call

    return decorate
