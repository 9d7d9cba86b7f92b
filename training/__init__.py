"""Trains the demo model, a small text-to-image model: `python -m training.run --help`."""
