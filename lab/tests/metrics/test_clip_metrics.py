"""Metrics of clips."""

from statistics import fmean

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_clips import moving
from toma_lab.metrics import METRICS, Sample, Weights, open_metrics
from toma_lab.metrics.clips import ClipSample, Flicker, OverFrames
from toma_lab.metrics.pixels import Mse, Psnr, Ssim

CPU = torch.device("cpu")


def grey(*values: int) -> list[Image.Image]:
    return [Image.new("RGB", (16, 12), (value, value, value)) for value in values]


class TestFlicker:
    @pytest.mark.parametrize(
        ("frames", "reference", "expected"),
        [
            ((10, 20, 30), (10, 20, 30), 0),
            ((15, 25, 35), (10, 20, 30), 0),  # darker everywhere, but as steady
            ((10, 30, 30), (10, 20, 30), 10),  # changes of 20, 0 in the place of 10, 10
            ((10, 10, 10, 10), (10, 20, 10, 20), 10),  # it moves less
            ((0, 255, 0), (255, 0, 255), 510),
        ],
    )
    def test_it_is_the_mean_difference_of_the_changes(self, frames, reference, expected):
        found = Flicker().score(ClipSample(grey(*frames), "", grey(*reference)))
        assert found == pytest.approx(expected, abs=1e-4)

    def test_it_does_not_depend_on_the_order_of_summation(self):
        """As the formula says, in numpy."""
        one, other = (
            np.random.default_rng(seed).integers(256, size=(5, 12, 16, 3), dtype=np.uint8) for seed in range(2)
        )
        expected = np.abs(np.diff(one.astype(float), axis=0) - np.diff(other.astype(float), axis=0)).mean()
        sample = ClipSample([*map(Image.fromarray, one)], "", [*map(Image.fromarray, other)])
        assert Flicker().score(sample) == pytest.approx(expected, rel=1e-5)


class TestOverFrames:
    def test_the_mean_of_all_frames(self):
        """More of them than are computed at once."""
        clip, other = moving(19, (80, 24)).frames, moving(19, (80, 24), color=(200, 0, 90)).frames
        for metric in (Mse(), Ssim()):
            single = [metric.score(Sample(a, "", b)) for a, b in zip(clip, other, strict=True)]
            assert OverFrames(metric).score(ClipSample(clip, "", other)) == pytest.approx(fmean(single), rel=1e-5)

    def test_psnr_stays_finite_if_one_frame_is_equal(self):
        sample = ClipSample(grey(10, 20), "", grey(10, 22))
        assert OverFrames(Psnr()).score(sample) == pytest.approx(10 * np.log10(255**2 / 2), rel=1e-5)


def test_which_metrics_clips_have():
    opened = open_metrics(METRICS, Weights(dino="/nowhere", clip="/nowhere"), CPU, clips=True)
    assert [metric.name for metric in opened.clip] == ["mse", "psnr", "ssim", "flicker"]
    assert not opened.image
    assert not opened.joint
    assert "fid and kid: they compare single images with real ones, not clips." in opened.missing
    assert not any("inception" in reason for reason in opened.missing)


def test_images_have_no_flicker():
    opened = open_metrics(["mse", "flicker"], Weights(), CPU)
    assert [metric.name for metric in opened.image] == ["mse"]
    assert opened.missing == ["flicker: it compares the frames of clips, and these are images."]
