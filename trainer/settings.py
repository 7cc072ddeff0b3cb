"""Frozen settings: the checks of their fields, and JSON without loss.

Every check raises ``ValueError`` with one line that names the field, the value and what to do.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any, TypeVar

_T = TypeVar("_T")


def require(ok: bool, what: str) -> None:
    """Raise ``ValueError(what)`` unless ``ok``."""
    if not ok:
        raise ValueError(what)


def number(name: str, value: float, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Raise unless ``value`` is finite and in [low, high] (``above``: strictly greater than low)."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    good = good and (value > low if above else value >= low) and value <= high
    span = f"above {low:g}" if above else f"at least {low:g}"
    if high != math.inf:
        span += f" and at most {high:g}"
    require(good, f"{name} is {value!r}: give a number {span}")


def whole(name: str, value: int, low: int, high: float = math.inf) -> None:
    """Raise unless ``value`` is a whole number in [low, high]."""
    require(isinstance(value, int) and not isinstance(value, bool), f"{name} is {value!r}: give a whole number")
    number(name, value, low, high)


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    require(value in choices, f"{name} is {value!r}: choose one of {', '.join(choices)}")


def to_dict(config: Any) -> dict[str, Any]:
    """The config as plain JSON types; ``from_dict`` gives it back equal."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(cls: type[_T], data: dict[str, Any], where: str = "") -> _T:
    """Build ``cls`` from ``to_dict``'s result. Unknown or missing fields raise ``ValueError`` naming them."""
    require(isinstance(data, dict), f"{where or cls.__name__}: expected an object, found {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(known))
    require(not unknown, f"{where or cls.__name__} has unknown settings {', '.join(unknown)}: remove them")
    values = {}
    for name, f in known.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], f"{where}.{name}" if where else name)
        else:
            needed = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            require(not needed, f"{where or cls.__name__} lacks {name}: add it")
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    origin = typing.get_origin(hint)
    if origin is tuple:
        require(isinstance(value, list | tuple), f"{where} is {value!r}: give a list")
        return tuple(_convert(typing.get_args(hint)[0], v, where) for v in value)
    if origin is types.UnionType:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    require(
        isinstance(value, hint) and (hint is bool or not isinstance(value, bool)),
        f"{where} is {value!r}: give a {hint.__name__}",
    )
    return value
