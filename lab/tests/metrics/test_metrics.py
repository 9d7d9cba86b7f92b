"""Every metric against values known by hand, and what is said where its weights are missing."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_weights import clip_folder, dino_folder, inception_file, lpips_file
from toma_lab.metrics import IMAGE_METRICS, JOINT_METRICS, Sample, UnavailableError, Weights, open_metrics
from toma_lab.metrics.features import ClipT, Dino
from toma_lab.metrics.inception import Inception
from toma_lab.metrics.lpips import Lpips
from toma_lab.metrics.pixels import Mse, Psnr, Ssim

CPU = torch.device("cpu")


def grey(level: int) -> Image.Image:
    return Image.new("RGB", (64, 64), (level, level, level))


def noise(seed: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    return Image.fromarray(values)


def score(metric, image, reference, prompt="a red apple") -> float:
    return metric.score(Sample(image, prompt, reference))


@pytest.fixture(scope="module")
def lpips(tmp_path_factory):
    return Lpips(lpips_file(tmp_path_factory.mktemp("lpips")), CPU)


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    return Dino(str(dino_folder(tmp_path_factory.mktemp("dino"))), CPU)


class TestPixels:
    def test_constants_by_hand(self):
        assert score(Mse(), grey(110), grey(100)) == pytest.approx(100, rel=1e-4)
        assert score(Psnr(), grey(110), grey(100)) == pytest.approx(10 * math.log10(255**2 / 100), rel=1e-4)

    def test_structural_similarity_of_constants_by_hand(self):
        """Without any structure only brightness counts: (2ab + c) / (a² + b² + c)."""
        first, second, constant = 110 / 255, 100 / 255, 0.01**2
        expected = (2 * first * second + constant) / (first**2 + second**2 + constant)
        assert score(Ssim(), grey(110), grey(100)) == pytest.approx(expected, rel=1e-3)

    def test_equal_images(self):
        assert score(Mse(), noise(0), noise(0)) == 0
        assert score(Psnr(), noise(0), noise(0)) == math.inf
        assert score(Ssim(), noise(0), noise(0)) == pytest.approx(1)


def test_several_images_at_once_score_as_one_by_one(lpips):
    samples = [Sample(noise(seed), "", noise(seed + 1)) for seed in range(3)]
    for metric in (Mse(), Psnr(), Ssim(), lpips):
        together = metric.scores(samples)
        assert together == pytest.approx([metric.score(sample) for sample in samples], rel=1e-5)
        assert len(set(together)) == 3
        assert metric.scores([]) == []


class TestLpips:
    def test_equal_images_are_at_distance_zero(self, lpips):
        assert score(lpips, noise(0), noise(0)) == 0

    def test_sums_the_heads_over_five_layers(self, lpips, tmp_path):
        """Unit features: with heads of 1, squared distances are 2 − 2·cos, the mean of which any layer is below 2."""
        weights = load_file(lpips_file(tmp_path))
        ones = {name: torch.ones_like(value) if name.startswith("lin") else value for name, value in weights.items()}
        save_file(ones, tmp_path / "ones.safetensors")
        metric = Lpips(tmp_path / "ones.safetensors", CPU)
        sample = Sample(noise(0), "", noise(1))
        activations = [metric.network.activations(pixels) for pixels in (sample.pixels, sample.reference_pixels)]
        expected = sum(
            float((2 - 2 * torch.cosine_similarity(one, other, dim=1)).mean())
            for one, other in zip(*activations, strict=True)
        )
        assert len(activations[0]) == 5
        assert metric.score(sample) == pytest.approx(expected, rel=1e-3)

    def test_other_files_are_refused(self, tmp_path):
        save_file({"features.0.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
        with pytest.raises(UnavailableError, match="does not hold the weights of LPIPS"):
            Lpips(tmp_path / "other.safetensors", CPU)


class TestDino:
    def test_one_minus_the_cosine_of_the_class_tokens(self, dino):
        assert score(dino, noise(0), noise(0)) == pytest.approx(0, abs=1e-6)
        with torch.no_grad():
            pixels = dino.processor(images=[noise(0), noise(1)], return_tensors="pt")["pixel_values"]
            one, other = dino.network(pixels).last_hidden_state[:, 0]
        expected = 1 - float(one @ other / (one.norm() * other.norm()))
        assert expected > 1e-4
        assert score(dino, noise(0), noise(1)) == pytest.approx(expected, rel=1e-3)

    def test_names_its_weights_but_not_where_they_lie(self, dino, tmp_path):
        again = Dino(str(dino_folder(tmp_path / dino.source.split()[0])), CPU)
        assert again.source == dino.source
        assert "/" not in dino.source


class TestClip:
    def test_a_hundred_times_the_cosine_of_prompt_and_image(self, tmp_path):
        metric = ClipT(str(clip_folder(tmp_path)), CPU)
        long_prompt = "a red apple and a blue shoe " * 10  # longer than the network reads
        for prompt in ("a red apple", long_prompt):
            found = metric.score(Sample(noise(0), prompt))
            assert -100 <= found <= 100
            assert found == metric.score(Sample(noise(0), prompt, noise(1)))  # it needs no reference
        assert score(metric, noise(0), None) != score(metric, noise(0), None, "a blue shoe")


class TestInception:
    @pytest.fixture
    def folders(self, tmp_path):
        """Means of −0.6, −0.2 and −0.2, 0.2 in all three channels."""
        for name, levels in (("real", (51, 102)), ("drawn", (102, 153))):
            (tmp_path / name).mkdir()
            for level in levels:
                grey(level).save(tmp_path / name / f"{level}.png")
        return tmp_path

    def test_distances_by_hand(self, folders):
        metric = Inception(("fid", "kid"), inception_file(folders), folders / "real", CPU)
        found = metric.scores(sorted((folders / "drawn").iterdir()))
        assert found["fid"] == pytest.approx(3 * 0.4**2, rel=1e-2)  # equal spread: the shift squared

        def kernel(one, other):
            return (one * other + 1) ** 3  # three equal features, and the kernel divides by their number

        within = kernel(-0.6, -0.2) + kernel(-0.2, 0.2)
        between = sum(kernel(one, other) for one in (-0.6, -0.2) for other in (-0.2, 0.2)) / 4
        assert found["kid"] == pytest.approx(within - 2 * between, rel=1e-2)

    def test_the_same_images(self, folders):
        metric = Inception(("fid",), inception_file(folders), folders / "real", CPU)
        assert metric.scores(sorted((folders / "real").iterdir())) == {"fid": pytest.approx(0, abs=1e-4)}
        assert metric.source.startswith("features.pt ")
        assert metric.source.endswith(", 2 images of real")

    def test_one_image_is_not_enough(self, folders):
        metric = Inception(("fid",), inception_file(folders), folders / "real", CPU)
        with pytest.raises(UnavailableError, match="at least two images"):
            metric.scores([folders / "real" / "51.png"])

    def test_wrong_file_and_empty_folder(self, folders):
        with pytest.raises(UnavailableError, match="is not a TorchScript file"):
            Inception(("fid",), folders / "real" / "51.png", folders / "real", CPU)
        (folders / "empty").mkdir()
        with pytest.raises(UnavailableError, match="no images"):
            Inception(("fid",), inception_file(folders), folders / "empty", CPU)

    def test_another_network_is_reported_at_once(self, folders):
        torch.jit.script(torch.nn.Conv2d(1, 1, 1)).save(str(folders / "other.pt"))
        with pytest.raises(UnavailableError, match=r"other\.pt' does not give features of 299×299 images"):
            Inception(("fid",), folders / "other.pt", folders / "real", CPU)

    def test_a_broken_image_is_named(self, folders):
        (folders / "real" / "broken.png").write_bytes(b"no image")
        metric = Inception(("fid",), inception_file(folders), folders / "real", CPU)
        with pytest.raises(UnavailableError, match=r"broken\.png' cannot be read"):
            metric.scores(sorted((folders / "drawn").iterdir()))


class TestOpening:
    def test_what_cannot_be_loaded_is_said_and_the_others_go_on(self, tmp_path):
        weights = Weights(dino=str(tmp_path / "no dino"), clip=str(tmp_path / "no clip"))
        found = open_metrics((*IMAGE_METRICS, *JOINT_METRICS), weights, CPU)
        assert [metric.name for metric in found.image] == ["mse", "psnr", "ssim"]
        assert found.joint == []
        for option in ("--lpips-weights", "--dino", "--clip", "--inception-weights"):
            assert sum(option in reason for reason in found.missing) == 1
        assert len(found.missing) == 4

    def test_unknown_metrics_are_refused(self):
        with pytest.raises(ValueError, match="'vmaf' is not known: use some of mse"):
            open_metrics(["mse", "vmaf"], Weights(), CPU)
