"""The video model in small on a CPU: clips rendered, autoencoder and transformer trained, exported, opened, merged."""

import itertools
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from PIL import Image, ImageDraw
from toma_diffusion_demo import loading, model_folder
from toma_diffusion_demo.loading import load_transformer, wan_pipeline
from toma_lab.bench import zoo
from toma_lab.pipelines.checkpoints import open_pipeline
from toma_lab.pipelines.clips import ClipRequest, generate

from toma_diffusion import Merge, Skip, speed_up
from training import clips, pack, run
from training import tokenizer as tokenizers
from training.clip_latents import ClipBatches
from training.clips import COLOURS, MOTIONS, PATTERNS, Plan, cut_out, load_subjects, render
from training.loop import Place
from training.models import build_wan
from training.settings import TINY_WAN, WAN
from training.wan import ClipFlow, PatchesAsMatrix, part_of

CPU = torch.device("cpu")
SUBJECTS = ("3d emoji of red apple", "3d emoji of blue book", "a photo of t-shirt", "a photo of shoes")


@pytest.fixture(scope="module", autouse=True)
def subject_file(tmp_path_factory):
    """The made-up data have these subjects, not those of the real model."""
    path = tmp_path_factory.mktemp("subjects") / "clip_subjects.txt"
    path.write_text("\n".join(SUBJECTS) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clips, "SUBJECTS", path)
        yield path


@pytest.fixture(scope="module")
def subjects(data):
    return load_subjects(data, 64, 2, CPU)


def plan_of(count=1, **changes):
    """Clips of the first subject in the middle of a plain white ground; all random numbers are 0.5."""
    values = {"image": 0, "mirrored": 0, "motion": MOTIONS.index("standing still"), "pattern": 0, "colour": 0}
    columns = [torch.full((count,), value) for value in (values | changes).values()]
    return Plan(*columns, torch.full((count, clips.CHANCES), 0.5))


def moving(motion, subjects, **changes):
    """The opacity of a clip's subject, by its difference from the ground: [frames, height, width], 0 or 1."""
    plan = plan_of(motion=MOTIONS.index(motion), **changes)
    frames = render(plan, subjects.sprites, clips.whole_clip(8, CPU), 64)[0]
    return ((frames - frames[:, :, :1, :1]).abs().amax(dim=1) > 0.2).float()


def centres(shown):
    """Of each frame: row and column."""
    line = torch.arange(64.0)
    area = shown.sum(dim=(1, 2))
    return (shown.sum(dim=2) @ line) / area, (shown.sum(dim=1) @ line) / area


class TestRendering:
    @pytest.mark.parametrize(
        ("motion", "axis", "sign"),
        [("moving left", 1, -1), ("moving right", 1, 1), ("moving up", 0, -1), ("moving down", 0, 1)],
    )
    def test_it_moves_where_the_caption_says(self, subjects, motion, axis, sign):
        found = centres(moving(motion, subjects))
        assert (sign * found[axis].diff() > 2).all()
        assert found[1 - axis].diff().abs().max() < 1

    @pytest.mark.parametrize(("motion", "sign"), [("growing", 1), ("shrinking", -1)])
    def test_it_changes_its_size(self, subjects, motion, sign):
        areas = moving(motion, subjects).sum(dim=(1, 2))
        assert (sign * areas.diff() > 0).all()
        assert max(areas) > 2 * min(areas)

    def test_grounds_have_the_named_colour(self):
        plans = plan_of(len(COLOURS))
        plans.colour.copy_(torch.arange(len(COLOURS)))
        found = clips.grounds(plans, 32).mean(dim=(2, 3)) * 255
        torch.testing.assert_close(found, torch.tensor(list(COLOURS.values())).float(), atol=0.5, rtol=0)


class TestSubjects:
    def test_an_emoji_is_cut_out_and_seen_through_its_hole(self):
        image = Image.new("RGB", (64, 64), "white")
        draw = ImageDraw.Draw(image)
        draw.ellipse((8, 8, 56, 56), fill="red")
        draw.ellipse((24, 24, 40, 40), fill="white")
        draw.point((32, 12), fill="white")  # a highlight
        opacity = cut_out(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 255)[0, 0]
        assert opacity[2, 2] == opacity[32, 32] == 0
        assert opacity[32, 14] == 1
        assert opacity[12, 32] > 0.5

    def test_garments_are_cards_and_named_with_their_colour(self, subjects):
        photos = [index for index, caption in enumerate(subjects.captions) if caption.startswith("a photo")]
        assert {"3d emoji of a red apple", "a photo of a blue t-shirt"} <= set(subjects.captions)
        assert (subjects.sprites[photos, 3, 18, 18] == 1).all()
        assert (subjects.sprites[photos, 3, 0, 0] == 0).all()

    def test_what_the_data_lack_is_named(self, data, subject_file):
        subject_file.write_text("3d emoji of red apple\n3d emoji of no such thing\n")
        try:
            with pytest.raises(ValueError, match="has no image of 3d emoji of no such thing, which clip_subjects"):
                load_subjects(data, 64, 2, CPU)
        finally:
            subject_file.write_text("\n".join(SUBJECTS) + "\n")

    def test_data_that_travel_hold_the_subjects_alone(self, data, tmp_path):
        pack.main(["--data", str(data), "--out", str(tmp_path), "--clips", "--size", "64"])
        assert len(load_subjects(tmp_path, 64, 2, CPU).captions) == len(load_subjects(data, 64, 2, CPU).captions) == 6


class TestCaptions:
    """Of the real subjects, with the vocabulary of the demo model."""

    @pytest.fixture
    def names(self):
        return Path(clips.__file__).with_name("clip_subjects.txt").read_text().splitlines()

    def test_the_longest_fit_into_the_text_encoder(self, names):
        tokenizer = tokenizers.load(model_folder() / "tokenizer")
        image = np.full((64, 64, 3), (140, 175, 210), dtype=np.uint8)  # light blue, the longest name of a colour
        subjects = {clips.caption_of(name, image) for name in names}
        assert len(subjects) == len(names) == 106
        captions = [
            clips.full_caption(*words) for words in itertools.product(subjects, MOTIONS, PATTERNS, list(COLOURS)[-4:])
        ]
        assert max(map(len, tokenizer(captions).input_ids)) <= tokenizer.model_max_length


class TestParts:
    def test_frames_are_consecutive_and_captions_go_with_their_clip(self):
        latents = torch.arange(3.0)[:, None] * 10 + torch.arange(4.0)  # [clips, frames]
        batches = ClipBatches(latents[..., None, None, None], torch.tensor([[10], [11], [12]]), torch.tensor([99]))
        found, tokens = batches.draw(64, 2, 0.3, torch.Generator().manual_seed(0))
        first, second = found[:, 0, :, 0, 0].unbind(dim=1)
        assert torch.equal(second, first + 1)
        assert set((first % 10).tolist()) == {0, 1, 2}
        said = tokens[:, 0]
        assert torch.equal(said[said != 99] - 10, (first // 10).long()[said != 99])
        assert 0.1 < (said == 99).float().mean() < 0.5

    def test_single_frames_come_first_and_whole_clips_last(self):
        ends = WAN.part_ends
        assert [part_of(WAN, done) for done in (0.0, ends[0], ends[1], 1.0, 1.2)] == [0, 1, 2, 2, 2]

    def test_patches_as_a_matrix_are_the_convolution(self):
        torch.manual_seed(0)
        layer = torch.nn.Conv3d(4, 8, (1, 2, 2), (1, 2, 2))
        x = torch.randn(2, 4, 3, 6, 8)
        expected = layer(x)
        layer.__class__ = PatchesAsMatrix
        torch.testing.assert_close(layer(x), expected)

    def test_the_full_transformer_sees_4096_tokens_and_travels_in_one_file(self):
        with torch.device("meta"):
            count = sum(weight.numel() for weight in build_wan(WAN, 192, 4).parameters())
        assert WAN.frames * (WAN.image_size // 16) ** 2 == 4096
        assert 14 < count / 2**20 < 15


@pytest.fixture(scope="module")
def text(trained):
    """The pipeline whose text encoder the model reads, and whose autoencoder it begins with."""
    return trained / "pipeline"


@pytest.fixture(scope="module")
def train(command, text):
    """`training.run` of the video model."""
    return lambda stage, work, *more: run.main(command(stage, work, "--model", "wan", "--text", str(text), *more))


@pytest.fixture(scope="module")
def work(train, tmp_path_factory):
    """The work folder after `all`."""
    work = tmp_path_factory.mktemp("wan")
    train("all", work, "--steps", "10", "--sample-steps", "1")
    return work


@pytest.fixture(scope="module")
def pipe(work, text):
    pipe = wan_pipeline(work / "pipeline", torch.float32, text)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def clip_of(pipe, **more):
    more = {"num_inference_steps": 2, "num_frames": 4, "height": 64, "width": 64, "output_type": "pt"} | more
    return pipe("3d emoji of a red apple", generator=torch.Generator().manual_seed(0), **more).frames


@pytest.mark.slow
class TestTraining:
    def test_latents_have_mean_0_and_deviation_1(self, work):
        latents = torch.load(work / "latents.pt", weights_only=True)["latents"].float()
        assert latents.shape == (TINY_WAN.clips, TINY_WAN.frames, 4, 8, 8)
        torch.testing.assert_close(latents.std(dim=(0, 1, 3, 4)), torch.ones(4), atol=0.05, rtol=0)

    def test_it_learns(self, work, text, tmp_path):
        torch.manual_seed(0)
        flow = ClipFlow(TINY_WAN, Place(tmp_path, CPU, text=text), ClipBatches.load(Place(work, CPU)))
        training = flow.training()
        losses = [training.advance(lambda generator: flow.loss(2, generator), rate=3e-3).item() for _ in range(60)]
        assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])

    def test_samples_and_reconstructions_are_drawn(self, work):
        with Image.open(work / "samples.png") as sheet, Image.open(work / "samples.webp") as moving:
            assert sheet.size == (4 * 4 * 128, 8 * (128 + 34))
            assert moving.n_frames == TINY_WAN.frames
        assert (work / "reconstructions.png").exists()

    def test_an_exported_model_is_trained_further(self, work, train, tmp_path):
        train("all", tmp_path, "--start", str(work / "pipeline"), "--steps", "1", "--sample-steps", "1")
        before = load_transformer(work / "pipeline" / "transformer", torch.float32).state_dict()
        average = torch.load(tmp_path / "diffusion.pt", weights_only=True)["average"]
        assert 0 < max((average[name] - before[name]).abs().max().item() for name in average) < 1e-3
        assert not (tmp_path / "vae.pt").exists()
        history = json.loads((tmp_path / "pipeline" / "training.json").read_text())
        assert [chapter["stage"] for chapter in history] == ["autoencoder", "transformer", "transformer"]


@pytest.mark.slow
class TestPipeline:
    def test_it_makes_as_many_frames_as_asked_for_without_a_warning(self, pipe, caplog):
        assert isinstance(pipe, WanPipeline)
        logger = logging.getLogger("diffusers")
        logger.addHandler(caplog.handler)
        try:
            shapes = [clip_of(pipe, num_frames=frames).shape for frames in (1, 3, 4)]
        finally:
            logger.removeHandler(caplog.handler)
        assert shapes == [(1, frames, 3, 64, 64) for frames in (1, 3, 4)]
        assert not caplog.records
        assert clip_of(pipe, height=32, width=48).shape == (1, 4, 3, 32, 48)

    def test_prompts_are_read_as_in_training(self, pipe, work):
        state = torch.load(work / "latents.pt", weights_only=True)
        expected = pipe.text_encoder(state["no_caption"][None].long()).last_hidden_state
        prompt, negative = pipe.encode_prompt("3d emoji of a red apple", num_videos_per_prompt=2)
        torch.testing.assert_close(negative, expected.expand(2, -1, -1))
        assert prompt.shape == negative.shape
        assert not torch.equal(prompt, negative)

    def test_half_precision_keeps_what_diffusers_keeps_in_single(self, work, text):
        pipe = wan_pipeline(work / "pipeline", text=text)
        kinds = {name: weight.dtype for name, weight in pipe.transformer.named_parameters()}
        assert pipe.transformer.dtype == kinds["blocks.0.attn1.to_q.weight"] == torch.bfloat16
        assert kinds["scale_shift_table"] == pipe.transformer.rope.freqs_cos.dtype == torch.float32
        assert clip_of(pipe, num_inference_steps=1).isfinite().all()


@pytest.mark.slow
class TestMerging:
    @pytest.fixture
    def opened(self, work, text, monkeypatch):
        """As the command line opens the folder. The text encoder is that of the tiny demo model."""
        monkeypatch.setattr(loading, "model_folder", lambda: text)
        return open_pipeline(str(work / "pipeline"), torch.float32)

    def test_the_folder_opens_as_a_model_and_makes_a_clip(self, opened):
        request = ClipRequest("3d emoji of a red apple", steps=1, frames=3, width=64, height=64)
        (clip,) = generate(opened, [request])
        assert (len(clip.frames), clip.size, clip.fps) == (3, (64, 64), 8)

    def test_it_is_merged_in_the_steps_of_the_window(self, opened):
        """The second of four steps still gives what it gives unmerged, the third does not."""

        def latents_after_each_step():
            found = []

            def after_step(pipe, step, timestep, tensors):
                found.append(tensors["latents"].clone())
                return {}

            clip_of(opened, num_inference_steps=4, callback_on_step_end=after_step)
            return found

        plain = latents_after_each_step()
        with speed_up(opened, merge=Merge(scope="module", window=(0.5, 1.0))) as handle:
            merged = latents_after_each_step()
            (kind,) = handle.summary().merge.kinds
        assert (kind.tokens_before, kind.tokens_after) == (4 * 4 * 4, 4 * 4 * 2)
        assert [torch.equal(*pair) for pair in zip(plain, merged, strict=True)] == [True, True, False, False]
        assert all(torch.equal(*pair) for pair in zip(plain, latents_after_each_step(), strict=True))

    def test_every_second_step_is_skipped(self, opened):
        with speed_up(opened, skip=Skip(computed=0.5)) as handle:
            clip_of(opened, num_inference_steps=4)
            assert "2 of 4 steps were computed" in str(handle.summary())
            clip_of(opened, num_inference_steps=6)
            assert "3 of 6 steps were computed" in str(handle.summary())

    def test_the_bench_calls_it_as_its_pipeline_does(self, work, opened):
        denoiser = zoo.load(str(work / "pipeline"), device=CPU)
        assert denoiser.default_size == (256, 256, 16)
        inputs = denoiser.inputs(1, 64, 64, frames=4)
        seen = {}
        opened.transformer.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
        clip_of(opened, num_inference_steps=1)
        assert {name: value.shape for name, value in inputs.items()} == {name: seen[name].shape for name in inputs}
