"""What leaves the nodes as words: errors and texts of one line that ComfyUI can log and send, however files are called.

A file name that is no UTF-8 becomes a text with lone surrogates, and ComfyUI's executor thread ends for good when it
cannot encode what it logs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import inspect
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ..trainer.progress import count

log = logging.getLogger(__name__)
__all__ = ["MOST", "count", "encodable", "guarded", "lines", "speaking"]
_Node = TypeVar("_Node", bound=type)

MOST = 1000
"""Characters of a message that are shown; the rest is noise of other people's errors."""
_TRACEBACK = "Traceback (most recent call last)"
_MISUSE = (LookupError, TypeError, AttributeError)
"""What a damaged file, or a mistake of ours, ends in: their own texts say nothing to a user."""


def guarded(node: _Node) -> _Node:
    """The node class, with what its methods say and raise made fit to be shown. All nodes go through this."""
    for name in ("execute", "validate_inputs", "fingerprint_inputs"):
        method = node.__dict__.get(name)
        if isinstance(method, classmethod):
            setattr(node, name, classmethod(_guard(method.__func__)))
    return node


def _guard(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(cls: type, *args: Any, **inputs: Any) -> Any:
        with speaking(inputs):
            return _shown(function(cls, *args, **inputs))

    # ComfyUI asks a validate_inputs which inputs it takes, and does not look through wrappers.
    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


def _shown(result: Any) -> Any:
    if isinstance(result, str):
        return encodable(result)
    if isinstance(getattr(result, "ui", None), dict):
        result.ui = _clean(result.ui)
    return result


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {key: _clean(each) for key, each in value.items()}
    return type(value)(map(_clean, value)) if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def speaking(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Errors raised inside come out with the same type and a text of one line. ``inputs``: what they may name.

    What is not the user's goes to the log, with its traceback.
    """
    from . import bridge

    try:
        yield
    except Exception as error:
        if bridge.ends_prompt(error):
            raise
        if not isinstance(error, ValueError) or isinstance(error, UnicodeError):
            log.error("%s", encodable(traceback.format_exc()))
        told = _rebuilt(error, encodable(_line(error, inputs)))
        raise told.with_traceback(error.__traceback__) from None


def encodable(text: str) -> str:
    """``text`` with lone surrogates written out, as in ``mod\\udce9.safetensors``."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def lines(text: str) -> list[str]:
    """The lines of a text that say something, such as prompts, without outer spaces."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def _rebuilt(error: Exception, text: str) -> Exception:
    try:
        told = type(error)(text)
        if str(told) == text:
            return told
    except Exception:  # its type asks for more than a text
        pass
    return ValueError(text) if isinstance(error, ValueError) else RuntimeError(text)


def _line(error: Exception, inputs: Mapping[str, Any]) -> str:
    text = str(error).strip()
    if isinstance(error, OSError):
        return _of_the_system(error, text, inputs)
    if isinstance(error, UnicodeEncodeError):
        return _bad_characters(inputs, lambda value: value != encodable(value), text)
    if isinstance(error, ValueError) and "null" in text and ("embedded" in text or "byte" in text):
        return _bad_characters(inputs, lambda value: "\0" in value, text)
    if isinstance(error, _MISUSE):
        return f"{type(error).__name__}: {_one(text)}: a file is damaged, or the pack is at fault; the log says more"
    return _one(text) or type(error).__name__


def _one(text: str) -> str:
    if _TRACEBACK in text:
        text = text.rstrip().rpartition("\n")[2]
    text = " ".join(text.split())
    return text if len(text) <= MOST else f"{text[:MOST]} ..."


def _bad_characters(inputs: Mapping[str, Any], bad: Callable[[str], bool], text: str) -> str:
    for name, value in _texts(inputs):
        if bad(value):
            return f"{name} is {value!r}: it has characters that cannot be in a file's name or a text, leave them out"
    return _one(text)


def _of_the_system(error: OSError, text: str, inputs: Mapping[str, Any]) -> str:
    """Also for errors of a worker, which arrive as texts."""
    found = re.match(r"\[(?:Errno|WinError) (\d+)\] (.*?)(?:: '(.*?)'.*)?$", text, re.DOTALL)
    code = error.errno or (int(found[1]) if found else None)
    reason = error.strerror or (found[2] if found else text)
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else (found and found[3]) or ""
    named = next((f"{name} is {value!r}: " for name, value in _texts(inputs) if value.strip() and value in path), "")
    where = path or "a file"
    if len(named) > 200:  # its length is what is wrong
        named = f"{named.partition(' is ')[0]}: "
    if code in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return f"{named}the disk of {os.path.dirname(path) or where} is full: free some space"
    if code == errno.ENAMETOOLONG:
        return f"{named or 'a name: '}{path[:60]}... is too long for this disk: shorten it"
    if code == errno.EROFS:
        return f"{named}{where} lies on a disk that cannot be written: choose another place"
    if code in (errno.EACCES, errno.EPERM):
        return f"{named}{where} may not be read or written by ComfyUI: change its permissions, or choose another place"
    if code in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        return f"{named}{where} is in the way ({reason}): choose another name, or move it away"
    return f"{named}{f'{path}: ' if path else ''}{_one(reason) or type(error).__name__}"


def _texts(inputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each text among the inputs and within their handles, with its name."""
    for name, value in inputs.items():
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _texts(value)
        elif dataclasses.is_dataclass(value):
            yield from _texts({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
