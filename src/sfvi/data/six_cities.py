"""Six cities: wheeze of 537 children of Steubenville, Ohio, at ages 7 to 10 (Fitzmaurice & Laird 1993)."""

import numpy as np

# Children by wheeze pattern 0000, 0001, ..., 1111 (ages 7 to 10): the whole data set is these 32 counts.
COUNTS = {
    0: (237, 10, 15, 4, 16, 2, 7, 3, 24, 3, 3, 2, 6, 2, 5, 11),  # mother does not smoke
    1: (118, 6, 8, 2, 11, 1, 6, 4, 7, 3, 3, 1, 4, 2, 4, 7),  # mother smokes
}
AGES = np.array([-2.0, -1.0, 0.0, 1.0])  # age minus 9


def six_cities() -> dict[str, np.ndarray]:
    """Load all children.

    Returns:
        `x` (537, 4, 4): intercept, mother smokes, age - 9, their product, at the four ages; `y` (537, 4): wheeze.
    """
    x, y = [], []
    for smoke, counts in COUNTS.items():
        design = np.stack([np.ones(4), np.full(4, smoke), AGES, smoke * AGES], axis=-1)
        for pattern, count in enumerate(counts):
            wheeze = [(pattern >> bit) & 1 for bit in (3, 2, 1, 0)]
            x += [design] * count
            y += [wheeze] * count
    return {"x": np.array(x, dtype=np.float32), "y": np.array(y, dtype=np.int32)}
