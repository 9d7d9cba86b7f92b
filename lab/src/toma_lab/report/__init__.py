"""What a run shows, for people: one self-contained page, and sheets of images. Made from a run's folder alone."""
