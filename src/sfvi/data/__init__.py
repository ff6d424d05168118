"""Data sets, shipped or downloaded, and ways to split them over silos."""

from .heart_disease import heart_disease
from .images import Images, fashion_mnist, mnist
from .partition import by_label, by_order, by_size, dirichlet, equally, split_units, take
from .posts import newsgroups
from .six_cities import six_cities

__all__ = [
    "Images",
    "by_label",
    "by_order",
    "by_size",
    "dirichlet",
    "equally",
    "fashion_mnist",
    "heart_disease",
    "mnist",
    "newsgroups",
    "six_cities",
    "split_units",
    "take",
]
