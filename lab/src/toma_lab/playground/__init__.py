"""A local page to try settings on a model: what they save, and what they do to the picture."""
