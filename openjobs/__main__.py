"""`python -m openjobs` is `openjobs`."""

from .cli import main

main()
