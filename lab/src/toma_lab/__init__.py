"""The laboratory: times, measures and tunes what toma-diffusion makes faster. The command `toma`."""

__version__ = "1.0.0rc1"
