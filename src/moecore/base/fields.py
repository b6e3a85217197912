"""Checks a record's fields by their annotations, then its relations between fields.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Window(CheckedRecord):
        size: Count
        overlap: Annotated[int, Bound(">=", 0), "use 0 for none"] = 0
        shape: Literal["flat", "hann"] | None = None

        def _find_field_errors(self) -> FieldErrors:
            if self.overlap >= self.size:
                yield "overlap", f"be < size ({self.size}): lower it"

`Window(size=True)` raises a ValueError of one line, "Window.size (True) must be a whole number
>= 1: pass an int"; `Window(size=4, overlap=4)` "Window.overlap (4) must be < size (4): lower it".

A public function checks its arguments in its first line:

    def prune(root: str | os.PathLike[str], keep: Count) -> list[Path]:
        check_arguments(prune, locals())

An annotation is a class (bool, int, float, str, torch.dtype, a record), a Literal, or a tuple, a
collection, a mapping or a union of them. A Callable must be callable, and `Any` is not checked.
`Annotated` adds bounds (`Bound`), allowed values (`OneOf`), and a string, which is the fix in the
error. Numbers without a bound are limited by `MAX_ABS`, so that int32 and fp32 can store them. A
tensor or an array is not a number.

A float field converts an int that a float represents exactly. No other value is converted.
"""

import math
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache, partial, reduce
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

MAX_ABS: dict[type, float] = {int: 2**31 - 1, float: 1e38}
EXACT = 2**53  # a float represents every int up to this number
NAMES: dict[Any, tuple[str, str]] = {
    bool: ("True or False", "pass a bool"),
    str: ("a string", "pass a str"),
    torch.dtype: ("a torch.dtype", "pass one, like torch.bfloat16"),
    nn.Module: ("an nn.Module", "pass a model"),
    os.PathLike: ("a path", "pass a pathlib.Path"),
    Callable: ("a function", "pass one"),
    Mapping: ("a dict", "pass a dict"),
}

FieldErrors = Iterator[tuple[str, str]]  # (field, "<relation>: <fix>") of each wrong field


class Bound(NamedTuple):
    """Annotation metadata: the number must be `sign` ("<", "<=", ">", ">=") `limit`."""

    sign: str
    limit: float


class OneOf(NamedTuple):
    """Annotation metadata: the value must be in `choices`, which may be a `Registry`."""

    choices: Collection[Any]


class Passes(NamedTuple):
    """Annotation metadata: `check(value)` must be True; errors describe valid values as `noun`."""

    check: Callable[[Any], bool]
    noun: str


def is_device(value: object) -> bool:
    """Whether a value is a torch.device or the name of a device."""
    try:
        return isinstance(value, str | torch.device) and torch.device(value) is not None
    except RuntimeError:
        return False


Count = Annotated[int, Bound(">=", 1)]
CountOrZero = Annotated[int, Bound(">=", 0)]
Positive = Annotated[float, Bound(">", 0)]
PositiveOrZero = Annotated[float, Bound(">=", 0)]
NumBytes = Annotated[int, Bound(">=", 1), Bound("<", 2**63)]
Seed = Annotated[int, Bound(">=", -(2**63)), Bound("<", 2**64)]
Device = Annotated[
    torch.device | str, Passes(is_device, "a device"), "pass 'cpu', 'cuda' or 'meta'"
]
FloatDtype = Annotated[
    torch.dtype, OneOf((torch.float32, torch.bfloat16, torch.float16, torch.float64))
]
MaxNorm = Annotated[float, Bound(">", 0), Bound("<=", math.inf), "use None to only measure"]


class _ValueCheck(NamedTuple):
    """The check for one annotation: predicate, noun of valid values in errors, fix, conversion."""

    allows: Callable[[Any], bool]
    name: Callable[[Any], str]
    fix: str
    convert: Callable[[Any], Any] = lambda value: value  # returns the value that a record stores


class CheckedRecord:
    """Base of dataclasses whose constructor raises a ValueError for the first invalid field."""

    __slots__ = ()

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return
        record_class: Any = type(self)
        for name, kind in _list_field_checks(record_class):
            value = getattr(self, name)
            if not kind.allows(value):
                _raise_field_error(self, name, f"be {kind.name(value)}: {kind.fix}")
            converted = kind.convert(value)
            if converted is not value:
                object.__setattr__(self, name, converted)  # records are frozen
        for name, relation in self._find_field_errors():
            _raise_field_error(self, name, relation)

    def _find_field_errors(self) -> FieldErrors:
        """Yield (field, text after "must") of wrong fields, such as ("n", "be > 1: raise it")."""
        return iter(())


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError if an argument does not match its annotation; pass `locals()`."""
    if torch.compiler.is_compiling():
        return
    for name, kind in _list_argument_checks(function):
        _check_value(name, arguments[name], kind)


def check_value(name: str, value: object, annotation: Any) -> None:
    """Raise a one-line ValueError if an argument's value does not match its annotation."""
    if not torch.compiler.is_compiling():
        _check_value(name, value, _make_check(annotation))


def quote(value: object) -> str:
    """Return the `repr` of a value for an error: one line, at most 80 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a `repr` of any object; an int of more than 4,300 digits has no text
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def format_name(name: object) -> str:
    """Return a name as text for an error; the text is quoted if it is long or not printable."""
    text = str(name)
    return text if len(text) <= 200 and text.isprintable() else quote(text)


def _check_value(name: str, value: object, check: _ValueCheck) -> None:
    if not check.allows(value):
        raise ValueError(f"{name} ({quote(value)}) must be {check.name(value)}: {check.fix}")


def _raise_field_error(record: Any, name: str, relation: str) -> None:
    value = reduce(getattr, name.split("."), record)
    raise ValueError(f"{type(record).__name__}.{name} ({quote(value)}) must {relation}")


@cache
def _list_field_checks(record: Any) -> list[tuple[str, _ValueCheck]]:
    hints = get_type_hints(record, include_extras=True)
    return [(field.name, _make_check(hints[field.name])) for field in fields(record)]


@cache
def _list_argument_checks(function: Callable[..., Any]) -> list[tuple[str, _ValueCheck]]:
    hints = get_type_hints(function, include_extras=True)
    return [(n, _make_check(h)) for n, h in hints.items() if n != "return" and h is not Any]


@cache
def _make_check(hint: Any) -> _ValueCheck:
    notes: list[Any] = []
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
    kind = _make_plain_check(hint, [note for note in notes if isinstance(note, Bound)])
    for note in notes:
        if isinstance(note, OneOf):
            kind = _make_choice_check(note.choices)
        if isinstance(note, Passes):
            kind = kind._replace(allows=note.check, name=partial(lambda noun, _: noun, note.noun))
    for note in notes:
        if isinstance(note, str):
            kind = kind._replace(fix=note)
    return kind


def _make_plain_check(hint: Any, bounds: list[Bound]) -> _ValueCheck:
    """Return the check for an annotation without `Annotated`; `bounds` limit a number."""
    hint = hint.__bound__ if isinstance(hint, typing.TypeVar) else hint
    origin, args = get_origin(hint), get_args(hint)
    if hint in MAX_ABS:
        return _make_number_check(hint, bounds)
    if origin is Literal:
        return _make_choice_check(args)
    if origin in (Union, types.UnionType):
        kind = _make_union_check([_make_check(arg) for arg in args])
        if not any(get_origin(arg) is os.PathLike for arg in args):
            return kind
        return kind._replace(  # errors show paths in one line
            allows=lambda value: kind.allows(value) and not set("\r\n") & set(str(value)),
            name=lambda value: f"{kind.name(value)}, without line breaks",
        )
    if origin is Callable:
        return _ValueCheck(callable, lambda value: "a function", "pass a function")
    if origin is tuple:
        return _make_tuple_check(args)
    if hint in (Any, object):
        return _ValueCheck(lambda value: True, lambda value: "anything", "pass one")
    if isinstance(origin, type):
        return _make_generic_check(origin, args)
    if typing.is_typeddict(hint):  # the caller checks its keys and values
        return _make_generic_check(Mapping, (str, Any))
    if not isinstance(hint, type):
        raise TypeError(f"annotation {hint!r} must be one that base/fields.py knows")
    if hint is type(None):
        return _ValueCheck(lambda value: value is None, lambda value: "None", "pass None")
    noun, fix = _describe_class(hint)
    return _ValueCheck(lambda value: isinstance(value, hint), lambda value: noun, fix)


def _describe_class(cls: type) -> tuple[str, str]:
    """Return the noun and the fix, such as ("a string", "pass a str"), of a class in errors."""
    article = "an" if cls.__name__[0] in "AEIOU" else "a"
    return NAMES.get(cls, (f"{article} {cls.__name__}", f"pass {article} {cls.__name__}"))


def _make_generic_check(origin: type, args: tuple[Any, ...]) -> _ValueCheck:
    """Return the check for a generic type such as `list[int]`; an iterator is not consumed."""
    if origin is type:
        (base,) = args
        name = f"a subclass of {base.__name__}"
        return _ValueCheck(
            lambda value: isinstance(value, type) and issubclass(value, base),
            lambda value: name,
            "pass a class",
        )
    name, fix = _describe_class(origin)
    if issubclass(origin, Mapping):
        keys, values = (_make_check(arg) for arg in args)
        return _ValueCheck(
            lambda value: (
                isinstance(value, origin)
                and all(keys.allows(k) and values.allows(v) for k, v in value.items())
            ),
            lambda value: f"{name} of {keys.name(None)} to {values.name(None)}",
            fix,
        )
    if issubclass(origin, Iterable):
        (items,) = (_make_check(arg) for arg in args)
        return _ValueCheck(
            lambda value: (
                isinstance(value, origin)
                and not isinstance(value, str | bytes | torch.Tensor)
                and (not isinstance(value, Collection) or all(items.allows(item) for item in value))
            ),
            lambda value: f"a list, each {items.name(None)}",
            "pass a list",
        )
    return _ValueCheck(lambda value: isinstance(value, origin), lambda value: name, fix)


def _make_number_check(number_type: type, bounds: list[Bound]) -> _ValueCheck:
    """Return the check for an int or float field with bounds; the type's limits also apply."""
    classes = (int, float) if number_type is float else (int,)
    signs = {bound.sign[0] for bound in bounds}
    of_type = Bound(">=", -MAX_ABS[number_type]), Bound("<=", MAX_ABS[number_type])
    implied = [b for b in of_type if b.sign[0] not in signs]
    low = max(_find_inclusive_limit(b, number_type) for b in bounds + implied if b.sign[0] == ">")
    high = min(_find_inclusive_limit(b, number_type) for b in bounds + implied if b.sign[0] == "<")
    noun = "a whole number" if number_type is int else "a finite number"
    if high == math.inf:
        noun = "a number"

    def is_number(value: object) -> bool:
        return isinstance(value, classes) and not isinstance(value, bool)

    def is_exact(value: Any) -> bool:
        """Whether the field stores a value exactly: an int in a float field may be too large."""
        return number_type is int or isinstance(value, float) or abs(value) <= EXACT

    def allows(value: Any) -> bool:  # no NaN; Python compares an int of any length with a float
        return is_number(value) and is_exact(value) and low <= value <= high

    def name(value: Any) -> str:
        is_too_large = is_number(value) and abs(value) > MAX_ABS[number_type]
        shown_bounds = [b for b in bounds if b.limit != math.inf]
        shown_bounds += implied if is_too_large else []
        if is_number(value) and not is_too_large and not is_exact(value):
            return f"{noun}, as an int at most {EXACT}"
        limits = " and ".join(f"{b.sign} {b.limit!r}" for b in shown_bounds)
        return f"{noun} {limits}".rstrip()

    if number_type is float:
        return _ValueCheck(allows, name, "pass a float", float)  # a float is returned unchanged
    return _ValueCheck(allows, name, "pass an int")


def _find_inclusive_limit(bound: Bound, number_type: type) -> float:
    """Return the limit of a bound as an inclusive limit: "> 0" has the limit 1 for an int."""
    if bound.sign.endswith("="):
        return bound.limit
    direction = 1 if bound.sign == ">" else -1
    if number_type is int:
        return bound.limit + direction
    return math.nextafter(bound.limit, direction * math.inf)


def _make_choice_check(choices: Collection[Any]) -> _ValueCheck:
    """Return the check that a value is one of the choices and has the type of a choice."""

    def name(_: object) -> str:
        listed = ", ".join(repr(choice) for choice in choices)
        return f"one of {listed}" if len(choices) > 1 else listed

    types_ = {type(choice) for choice in choices}  # an array has no truth, and True is no 1
    fix = "choose one" if len(choices) > 1 else "use it"
    return _ValueCheck(lambda value: type(value) in types_ and value in choices, name, fix)


def _make_union_check(checks: list[_ValueCheck]) -> _ValueCheck:
    def convert(value: Any) -> Any:
        return next(kind for kind in checks if kind.allows(value)).convert(value)

    return _ValueCheck(
        lambda value: any(kind.allows(value) for kind in checks),
        lambda value: " or ".join(kind.name(value) for kind in checks),
        checks[0].fix,
        convert,
    )


def _make_tuple_check(args: tuple[Any, ...]) -> _ValueCheck:
    """Return the check for a tuple with these type arguments; `...` allows any length."""
    kinds = [_make_check(arg) for arg in args if arg is not Ellipsis]
    is_open = Ellipsis in args

    def allows(value: Any) -> bool:
        if not isinstance(value, tuple) or not (is_open or len(value) == len(kinds)):
            return False
        item_kinds = kinds * len(value) if is_open else kinds
        return all(kind.allows(item) for kind, item in zip(item_kinds, value, strict=True))

    def name(value: Any) -> str:
        items = kinds[0].name(None)
        return f"a tuple, each {items}" if is_open else f"a tuple of {len(kinds)}, each {items}"

    def convert(value: Any) -> Any:
        """Convert the items of a tuple; return `value` itself if no item changes."""
        item_kinds = kinds * len(value) if is_open else kinds
        pairs = [(item, kind.convert(item)) for kind, item in zip(item_kinds, value, strict=True)]
        return value if all(a is b for a, b in pairs) else tuple(b for _, b in pairs)

    return _ValueCheck(allows, name, "pass a tuple", convert)
