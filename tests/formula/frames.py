"""Tables that the tests of formulas use."""

import numpy as np
import pandas as pd

import sfvi


def mixed_table(rows=60, seed=0):
    """Numbers far from zero, text, whole numbers, an exposure, groups and an outcome."""
    generator = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "x": generator.normal(50.0, 9.0, rows),
            "w": generator.uniform(1.0, 5.0, rows),
            "g": generator.choice(["a", "b", "c"], rows),
            "h": generator.choice(["p", "q"], rows),
            "k": generator.integers(1, 4, rows),
            "t": generator.uniform(0.5, 2.0, rows),
            "id": generator.integers(0, 6, rows),
            "y": generator.normal(120.0, 15.0, rows),
            "n": generator.integers(0, 5, rows),
        }
    )


def split(table, assigned):
    """Silos from the silo of each row."""
    return {str(name): table[assigned == name] for name in np.unique(assigned)}


def six_cities(every):
    """Some children of the six cities, which are sorted by smoke, as a long table."""
    data = sfvi.data.six_cities()
    x, y = data["x"][:536:every], data["y"][:536:every]
    return pd.DataFrame(
        {
            "child": np.repeat(np.arange(len(x)), 4),
            "smoke": x[..., 1].ravel(),
            "age": x[..., 2].ravel(),
            "wheeze": y.ravel(),
        }
    )
