"""Measurements: ``python -m benchmarks.NAME --json`` ends with one line of JSON.

Ratios are taken in one process, alternating, as medians: the machines are noisy.
"""
