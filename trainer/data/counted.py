"""Randomness that is counted, not drawn: hashes of what a choice is made for."""

from __future__ import annotations

import hashlib

import numpy as np

WHOLE = (1 << 64) - 1


def mix(a: int, b: int) -> int:
    """A 64-bit hash of two integers (the finaliser of splitmix64 over their combination)."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & WHOLE
    for _ in range(2):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WHOLE
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WHOLE
        x ^= x >> 31
    return x


def mix_all(a: int | np.ndarray, b: np.ndarray) -> np.ndarray:
    """``mix`` of every pair: uint64 arrays (or one number for ``a``)."""
    start = np.uint64((a * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & WHOLE) if isinstance(a, int) else (
        a * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019))
    x = b + start
    for _ in range(2):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x


def chance(*parts: int | str) -> float:
    """A number in [0, 1) that depends on all ``parts`` and nothing else."""
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)
