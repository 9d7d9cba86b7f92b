"""Image quality, measured as in the paper. One run is one folder of images, scores and a table."""

from toma_lab.evaluation.folder import RunFolder, Scores
from toma_lab.evaluation.plan import BASELINE, NOISE_FLOOR, Item, Plan, Variant

__all__ = ["BASELINE", "NOISE_FLOOR", "Item", "Plan", "RunFolder", "Scores", "Variant"]
