"""Data for the scaling study, and ways to cut units into silos."""

import numpy as np

from sfvi.bench.step import even_sizes
from sfvi.data import split_units

ROWS_PER_UNIT = 4
COEFFICIENTS = np.array([-2.0, 0.5, -0.2, 0.1], np.float32)
RANDOM_SD = np.float32(2.0)


def ragged_sizes(total: int, num_silos: int) -> list[int]:
    """Cut `total` into sizes between half and one and a half times the even ones."""
    sizes = np.array(even_sizes(total, num_silos))
    half = num_silos // 2
    shift = np.random.default_rng(1).integers(0, sizes.min() // 2 + 1, half)
    sizes[:half] += shift
    sizes[half : 2 * half] -= shift
    return sizes.tolist()


def simulate(sizes: list[int]) -> dict[str, dict[str, np.ndarray]]:
    """Draw wheeze at four ages from the logistic mixed model for units dealt to silos of the given sizes."""
    units = sum(sizes)
    rng = np.random.default_rng(0)
    age = np.broadcast_to(np.arange(-2, 2, dtype=np.float32), (units, ROWS_PER_UNIT))
    smoke = np.broadcast_to(rng.integers(0, 2, (units, 1)).astype(np.float32), age.shape)
    x = np.stack([np.ones_like(age), smoke, age, smoke * age], axis=-1)
    logits = x @ COEFFICIENTS + RANDOM_SD * rng.standard_normal((units, 1), np.float32)
    y = (rng.random(logits.shape, np.float32) < 1 / (1 + np.exp(-logits))).astype(np.int32)
    silos, _ = split_units({"x": x, "y": y}, sizes, seed=0)
    return silos
