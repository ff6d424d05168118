"""What a consortium installs everywhere: the model, its options, and how each silo finds its data."""

import sfvi
from sfvi.deploy import SiloInput

SIZES = {"north": 200, "south": 200, "west": 137}
model = sfvi.zoo.logistic_mixed_model()


def load(name):
    silos, ids = sfvi.data.split_units(sfvi.data.six_cities(), SIZES, seed=1)
    name = name if name in SIZES else "north"  # for silos that will not be let in
    return SiloInput(silos[name], ids[name])
