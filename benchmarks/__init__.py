"""One command, `python -m benchmarks`: what a step of SFVI costs, against others and as silos and rows grow.

Performance is given as ratios of things measured side by side in one run; seconds are shown but belong to the machine.
"""
