"""Experiments, one folder each: what was asked, the command that answers it, and the answer."""
