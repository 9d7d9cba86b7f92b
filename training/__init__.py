"""Trains the small text-to-image model that the package carries: `python -m training.run --help`."""
