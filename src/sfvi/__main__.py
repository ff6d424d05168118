"""`python -m sfvi`: the command line."""

from .cli import main

main()
