"""What each state format does to the moments of Adam, against float32 (``python -m benchmarks.formats --json``).

2,000 steps, then 2,000 with gradients at 0.3 of their size (a code that cannot decay shows itself there): for
gradients whose scales within a block of 256 are lognormal with sigma 1 and 3, for 2 % of dead elements, and for
gradients that are there one step in twenty. The last line is one JSON object; its scalars are the worst of all these:

- ``bytes``: of one element of one state.
- ``m_error``: sum of abs(m - m_f32) over the sum of abs(m_f32).
- ``sqrt_v_bias``: mean of sqrt(v / v_f32) - 1 over the elements that ever had a gradient (``int8``: the median).
- ``sqrt_v_mean``, ``sqrt_v_median``, ``sqrt_v_p99``: mean and median of it, and the 99th percentile of its size.
- ``v_error``: as ``m_error``, of the second moment.
- ``v_zeros``: elements whose second moment decodes to 0 and is not.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

import torch
from torch import Tensor

from trainer.optim import AdamRule, UpdateSpec, formats_for, make_storage, update_chunk_
from trainer.optim.formats import FORMATS

SCENARIOS = ("sigma1", "sigma3", "dead", "sparse")
WORST = ("m_error", "v_error", "sqrt_v_mean", "sqrt_v_median", "sqrt_v_p99", "v_zeros")


def gradients(scenario: str, numel: int, seed: int) -> Any:
    """A function from step to gradient; the same for every format."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp((3.0 if scenario == "sigma3" else 1.0) * torch.randn(numel, generator=generator)) * 1e-5
    if scenario == "dead":
        scale[torch.rand(numel, generator=generator) < 0.02] = 0

    def gradient(step: int, steps: int) -> Tensor:
        own = torch.Generator().manual_seed(seed * 1_000_003 + step)
        grad = torch.randn(numel, generator=own) * scale * (1.0 if step <= steps else 0.3)
        return grad * (torch.rand(numel, generator=own) < 0.05) if scenario == "sparse" else grad

    return gradient


def moments(spec: UpdateSpec, storage: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Both moments in float64."""
    shaped = {k: v.view(-1, 256) if v.numel() % 256 == 0 and v.dim() == 1 else v for k, v in storage.items()}
    shaped = {k: storage[k] if k.endswith(".scale") else v for k, v in shaped.items()}
    m = spec.format_of(shaped, "exp_avg").decode(shaped, "exp_avg", True)
    v = spec.format_of(shaped, "exp_avg_sq").decode(shaped, "exp_avg_sq", False)
    return m.double().view(-1), v.double().view(-1)


def compare(kept: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> dict[str, float]:
    """The figures of one format at one moment."""
    (m, v), (m0, v0) = kept, exact
    alive = v0 > 0
    bias = (v[alive] / v0[alive]).sqrt() - 1
    return {
        "m_error": float((m - m0).abs().sum() / m0.abs().sum()),
        "v_error": float((v - v0).abs().sum() / v0.sum()),
        "sqrt_v_mean": float(bias.mean()),
        "sqrt_v_median": float(bias.median()),
        "sqrt_v_p99": float(bias.abs().quantile(0.99)),
        "v_zeros": float((v[alive] == 0).sum()),
    }


def measure(scenario: str, steps: int, numel: int, seed: int = 0) -> dict[str, list[dict[str, float]]]:
    """The figures of every format after ``steps`` and after twice as many."""
    rule = AdamRule()
    specs = {name: UpdateSpec(rule=rule, state_format=formats_for(rule, name), seed=seed) for name in FORMATS}
    storages = {name: make_storage(spec, numel, torch.float32) for name, spec in specs.items()}
    weight, gradient = torch.zeros(numel), gradients(scenario, numel, seed)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in FORMATS}
    for step in range(1, 2 * steps + 1):
        grad = gradient(step, steps)
        for name, spec in specs.items():
            update_chunk_(spec, weight, grad, storages[name], lr=0.0, step=step)
        if step % steps == 0:
            exact = moments(specs["f32"], storages["f32"])
            for name, spec in specs.items():
                found[name].append(compare(moments(spec, storages[name]), exact))
    return found


def worst(values: list[float]) -> float:
    """The value of the largest size."""
    return max(values, key=lambda x: math.inf if math.isnan(x) else abs(x))


def run(steps: int, numel: int) -> dict[str, Any]:
    """Every scenario; the worst of them by format."""
    details: dict[str, dict[str, Any]] = {}
    for scenario in SCENARIOS:
        for name, both in measure(scenario, steps, numel).items():
            details.setdefault(name, {})[scenario] = both
    formats = {}
    for name, scenarios in details.items():
        entries = [entry for both in scenarios.values() for entry in both]
        row = {key: worst([entry[key] for entry in entries]) for key in WORST}
        row["sqrt_v_bias"] = row["sqrt_v_median" if name == "int8" else "sqrt_v_mean"]
        layout = FORMATS[name].layout("x", 1 << 24, True)
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in layout.values())
        formats[name] = {"bytes": size / (1 << 24), **row, "scenarios": scenarios}
    return {"steps": 2 * steps, "elements": numel, "formats": formats}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps: to try it, not to quote")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of 256 elements")
    arguments = parser.parse_args()
    result = run(200 if arguments.quick else 2000, 256 * arguments.blocks)
    out = sys.stdout.write
    out(f"{'format':8}{'bytes':>8}{'m error':>12}{'sqrt v bias':>13}{'median':>12}{'p99':>12}{'zeros':>8}\n")
    for name, row in result["formats"].items():
        out(f"{name:8}{row['bytes']:8.3f}{row['m_error']:12.2e}{row['sqrt_v_bias']:13.2e}{row['sqrt_v_median']:12.2e}")
        out(f"{row['sqrt_v_p99']:12.2e}{row['v_zeros']:8.0f}\n")
    if arguments.json:
        out(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
