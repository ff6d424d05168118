"""Engines run the five functions of an algorithm. Nothing algorithmic lives here."""
