"""The file `tuned.json`: what `speed_up` takes from it, and what it refuses."""

import json

import pytest
import torch
from tiny import flux_transformer
from tiny_text import text_pipeline
from toma_lab.pipelines.clips import latents_of
from toma_lab.pipelines.generation import ImageRequest

from toma_diffusion import Merge, UsageError, speed_up
from toma_diffusion.others import METHODS
from toma_diffusion.tuned import ClipSize, Tuned

CONFIG = Merge(ratio=0.5, num_regions=4)
ToMeSD = METHODS["tomesd"]
FEWER = {"name": "steps", "settings": {"steps": 3}}


@pytest.fixture(scope="module")
def pipe():
    return text_pipeline()


@pytest.fixture
def written(tmp_path):
    def write(merge=CONFIG, shortcuts=(), preset=None, num_steps=4, model_class="UNet2DConditionModel"):
        path = tmp_path / "tuned.json"
        Tuned(model_class, num_steps, preset, merge, shortcuts=tuple(shortcuts)).write(path)
        return path

    return write


def latents(pipe, steps=4):
    return latents_of(pipe, ImageRequest("a red apple", steps=steps))


def test_it_is_read_as_it_was_written(written):
    path = written(ToMeSD(ratio=0.25), [FEWER])
    assert Tuned.read(path) == Tuned("UNet2DConditionModel", 4, None, ToMeSD(ratio=0.25), None, (FEWER,), {})
    assert json.loads(path.read_text())["merge"]["method"] == "tomesd"
    assert "clip" not in json.loads(path.read_text())


def test_that_of_clips_says_so(pipe, tmp_path):
    path = tmp_path / "tuned.json"
    tuned = Tuned("WanTransformer3DModel", 4, None, CONFIG, clip=ClipSize(81, 832, 480))
    tuned.write(path)
    assert json.loads(path.read_text())["clip"] == {"frames": 81, "width": 832, "height": 480}
    assert Tuned.read(path) == tuned
    with pytest.raises(UsageError, match="found for clips, and a StableDiffusionPipeline generates images"):
        tuned.check_thing(pipe, makes_clips=False)
    with pytest.raises(UsageError, match="found for images, and a StableDiffusionPipeline generates clips"):
        Tuned("UNet2DConditionModel", 4, None, CONFIG).check_thing(pipe, makes_clips=True)


def test_it_does_what_its_configuration_does(pipe, written):
    with speed_up(pipe, merge=CONFIG):
        expected = latents(pipe)
    for given in (written(), str(written())):
        with speed_up(pipe, given) as handle:
            assert handle.summary().merge.config.changed({"skip_blocks": None}) == CONFIG
            assert torch.equal(latents(pipe), expected)


def test_another_class_is_refused(written):
    with pytest.raises(UsageError, match="found for a UNet2DConditionModel, this model is a FluxTransformer2DModel"):
        speed_up(flux_transformer(), written())


class TestSteps:
    def test_another_number_is_refused_at_the_first_step(self, pipe, written):
        with (
            speed_up(pipe, written()),
            pytest.raises(UsageError, match=r"found for 4 steps, and this generation has 5.*toma tune --steps 5"),
        ):
            latents(pipe, steps=5)

    def test_switched_off_nothing_is_refused(self, pipe, written):
        with speed_up(pipe, written()) as handle:
            handle.enabled = False
            latents(pipe, steps=5)

    def test_merging_with_fewer_steps_wants_the_fewer(self, pipe, written):
        with speed_up(pipe, written(shortcuts=[FEWER])):
            latents(pipe, steps=3)
            with pytest.raises(UsageError, match="found for 3 steps, and this generation has 4"):
                latents(pipe, steps=4)

    def test_in_a_loop_of_ones_own_the_number_must_be_said(self, pipe, written):
        unet = pipe.unet
        text = torch.randn(1, 7, unet.config.cross_attention_dim)
        sample = torch.randn(1, unet.config.in_channels, unet.config.sample_size, unet.config.sample_size)
        with speed_up(unet, written()) as handle, torch.no_grad():
            with pytest.raises(UsageError, match=r"the number of steps is not known here: call handle\.begin"):
                unet(sample, 10, text)
            handle.begin(4)
            handle.step(0)
            unet(sample, 10, text)


class TestNotForSpeedUp:
    def test_fewer_steps(self, pipe, written):
        with pytest.raises(UsageError, match="call the pipeline with num_inference_steps=3"):
            speed_up(pipe, written(None, [FEWER]))

    def test_a_cache(self, pipe, written):
        cache = {"name": "deepcache", "settings": {"interval": 3}}
        with pytest.raises(UsageError, match=r"has deepcache \(interval=3\).*toma generate --config"):
            speed_up(pipe, written(None, [cache]))

    def test_nothing(self, pipe, written):
        with pytest.raises(UsageError, match="nothing was found within the limit"):
            speed_up(pipe, written(None))


class TestMistakes:
    def test_it_cannot_be_changed(self, pipe, written):
        with pytest.raises(UsageError, match="cannot be changed by merge"):
            speed_up(pipe, written(), merge=CONFIG)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "is not JSON"),
            ('{"format": 1}', "has format 1, this version reads format 3"),
            ("[]", "has format None"),
            ('{"format": 3, "preset": "fast"}', "is not complete"),
        ],
    )
    def test_other_files(self, pipe, tmp_path, text, message):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(UsageError, match=message):
            speed_up(pipe, tmp_path / "other.json")

    def test_no_file(self, pipe):
        with pytest.raises(UsageError, match=r"'gone.json' cannot be read \(No such file"):
            speed_up(pipe, "gone.json")
