"""Opens a pipeline and generates an image with it, the same everywhere."""
