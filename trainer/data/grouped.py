"""What is said of many files, in one line for each thing that is said: counted, with the first few by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

NAMED = 3
"""Files of a group that are named."""
_CAPTION = r"has (no|an empty) caption file(?: \(.*?\))?: trained with "
_COPY = r"(?:is the same file as|has the same pixels as) .*"
_KINDS = (
    (r"is \d+ x \d+ px and is enlarged .*", "pictures{} are enlarged more than 2 times, which makes them soft"),
    (r"loses \d+% of its area to the crop .*", "pictures{} lose more than a third of their area to the crop"),
    (_COPY + " as often", "pictures{} are copies of others: those are trained more often"),
    (_COPY, "pictures{} are copies of others"),
    (_CAPTION + "its name's words, .*", r"pictures{} have \1 caption file: trained with their names' words"),
    (_CAPTION + "its folder's name, .*", r"pictures{} have \1 caption file: trained with their folder's name"),
    (_CAPTION + "(.*)", r"pictures{} have \1 caption file: trained with \2"),
    (r"has a caption file that is not UTF-8: (.*); save it as UTF-8 \(.*",
     r"pictures{} have caption files that are not UTF-8: \1; save them as UTF-8"),
    (r"has a caption file that (?:is|begins) .*: save it as UTF-8 \(.*",
     "pictures{} have caption files whose encoding is in doubt: save them as UTF-8"),
    (r"has a caption of \d+ tokens: (\d+) are read, .*",
     r"pictures{} have captions of more than \1 tokens: their ends are cut off"),
    (r"has .*: pictures without one are left out by choice", "pictures{} have no caption: left out by choice"),
    (r"has \d+ (?:frames|pages): only the first is trained",
     "pictures{} have several frames or pages: only the first is trained"),
    (r"has \d+ (?:frames|pages): animations are left out by choice", "pictures{} are animated: left out by choice"),
    (r"is \d+ x \d+ px: it is decoded at a smaller scale", "pictures{} are very large: decoded at a smaller scale"),
    (r"is \d+ x \d+ px, less than one bucket step of (\d+): .*",
     r"pictures{} are less than one bucket step of \1 px: allow upscaling or use larger ones"),
    (r"is a camera RAW.*", "pictures{} are camera RAWs: develop them and save them as PNG or JPEG"),
    (r"is of a kind that is not read \((.*?)\): .*",
     r"pictures{} are of a kind that is not read (\1): save them as PNG"),
    (r"is no picture that can be read, .*",
     "files{} are no pictures, though their names say so: remove them, or save them as PNG"),
    (r"needs a plugin to be read: (.*)", r"pictures{} need a plugin to be read: \1"),
    (r"cannot be decoded .*", "files{} cannot be decoded: they are damaged, or cut short"),
    (r"is an empty file", "pictures{} are empty files"),
    (r"is in the validation folder too, .*", "pictures{} are in the validation folder too: measured, not trained"),
    (r"is a mask by its name, .*", "files{} are masks by their names, but no pictures are called so"),
    (r"is a caption file, but no picture is called so \(.*",
     "caption files{} are called almost like a picture, but not quite: rename them"),
    (r"is a caption file, .*",
     "caption files{} belong to no picture: were pictures renamed, or have they another extension?"),
)  # fmt: skip
"""What is said of one file, and the same of many; ``{}`` is where they are named."""


@functools.cache
def _compiled() -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern, re.DOTALL), many) for pattern, many in _KINDS]


def grouped(found: Iterable[tuple[str, str]], named: int = NAMED) -> list[str]:
    """A line for each thing that is said of (path, what is said), the most frequent first; a path counts once in each.

    ``named``: so many paths of each are named.
    """
    groups: dict[str, dict[str, str]] = {}
    for path, what in found:
        groups.setdefault(_kind(what), {}).setdefault(path, what)
    return [_line(kind, said, named) for kind, said in sorted(groups.items(), key=lambda item: -len(item[1]))]


def _kind(what: str) -> str:
    for pattern, many in _compiled():
        if match := pattern.fullmatch(what):
            return match.expand(many) if "\\" in many else many
    return re.sub(r"\d+", "0", what)


def _line(kind: str, said: dict[str, str], named: int) -> str:
    first, what = next(iter(said.items()))
    if len(said) == 1:
        return f"{first} {what}"
    names = list(said)[: named if len(said) > named + 1 else named + 1]  # not "and 1 more", which is no shorter
    more = f" and {len(said) - len(names)} more" if len(said) > len(names) else ""
    listed = f" ({', '.join(names)}{more})"
    if "{}" in kind:
        return f"{len(said)} {kind.replace('{}', listed, 1)}"
    return f"{len(said)} files{listed}: the first {what}, the others likewise"
