"""Versions of a caption: its tags in other orders, some left out, and what is put before and behind.

A version is a function of the text and its number alone, so that it stays the same from run to run and is encoded once.
"""

from __future__ import annotations

import math

from ..config import DatasetConfig
from .counted import WHOLE, chance, mix


def split_tags(text: str) -> list[str]:
    """The parts of a caption between commas, without white space around them; empty ones are left out."""
    return [tag for tag in (part.strip() for part in text.split(",")) if tag]


def versions(texts: tuple[str, ...], config: DatasetConfig) -> tuple[str, ...]:
    """The captions that are trained, one at a time, of a picture that has ``texts``.

    Each text at least once, and together ``caption_variants`` of them at least where tags are shuffled or left out.
    """
    if config.shuffle_tags or config.tag_dropout > 0:
        numbers = range(max(len(texts), config.caption_variants))
        counts = [len(range(i, len(numbers), len(texts))) for i in range(len(texts))]
        each = [_versions(text, count, config) for text, count in zip(texts, counts, strict=True)]
        texts = tuple(each[n % len(texts)][n // len(texts)] for n in numbers)
    return tuple(framed(text, config) for text in texts)


def framed(text: str, config: DatasetConfig) -> str:
    """``text`` between the set's prefix and suffix, one space between them unless a comma or the like follows."""
    prefix, suffix = config.caption_prefix.strip(), config.caption_suffix.strip()
    text = f"{prefix} {text}".strip()
    return text + suffix if suffix[:1] in (",", ".", ";", ":", "!", "?") else f"{text} {suffix}".strip()


def _versions(text: str, count: int, config: DatasetConfig) -> list[str]:
    tags = split_tags(text)
    front, rest = tags[: config.keep_tags], tags[config.keep_tags :]
    seed = int(chance("tags", text) * (1 << 53))
    orders = _orders(len(rest), count, seed) if config.shuffle_tags else [tuple(range(len(rest)))] * count
    found = []
    for number, order in enumerate(orders):
        stream = mix(seed, 2 * number + 1)
        kept = [rest[i] for i in order if mix(stream, i) >= config.tag_dropout * (WHOLE + 1)]
        found.append(", ".join(front + kept))
    return found


def _orders(length: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """``count`` orders of so many things, all different as far as there are so many."""
    possible = math.factorial(length) if length < 6 else count
    found: dict[tuple[int, ...], None] = {}
    attempt = 0
    while len(found) < min(count, possible):
        stream = mix(seed, 2 * attempt)
        found[tuple(sorted(range(length), key=lambda i: mix(stream, i)))] = None
        attempt += 1
    different = list(found)
    return [different[number % len(different)] for number in range(count)]
