"""Flower 1.41: stock commands, TLS and node keys, a new process for every message; for algorithms with few rounds."""
