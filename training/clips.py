"""Renders clips on the device: an emoji or a photograph that moves, turns or changes its size over a ground."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample, interpolate, max_pool2d

from training.captions import OTHER_NAMES, colour_of, may_mirror, with_article
from training.data import SETS, read_images, read_set

SUBJECTS = Path(__file__).with_name("clip_subjects.txt")
"""Captions of the data: emoji that are easy to tell apart, and kinds of garments."""
SAID = {"longsleeve": OTHER_NAMES["longsleeve"][1]}
"""Labels that nobody would type."""

MOTIONS = (
    "moving left",
    "moving right",
    "moving up",
    "moving down",
    "turning left",
    "turning right",
    "growing",
    "shrinking",
    "bouncing",
    "standing still",
)
PATTERNS = ("plain", "striped", "checkered", "dotted", "gradient")
PATTERN_SHARES = (0.4, 0.15, 0.15, 0.15, 0.15)
COLOURS = {
    "white": (240, 240, 240),
    "grey": (130, 132, 138),
    "red": (205, 70, 65),
    "yellow": (238, 205, 85),
    "green": (85, 165, 95),
    "blue": (70, 115, 205),
    "purple": (130, 90, 185),
    "pink": (240, 165, 195),
}
"""Of grounds, in RGB."""

WHITE, NEARLY_WHITE = 0.992, 0.96
"""The ground of an emoji, and what its edge may be blended to, of 1."""
HOLE = 9
"""Pixels each way, of 256, that are the ground seen through a hole and no highlight."""
SPRITE_SHARE = 9 / 16
"""Of the frame's width and height, in pixels, that a subject is stored with: about as large as it is shown."""
CHANCES = 6
"""Random numbers a clip: two of the position, one each of size, speed, ground and its phase."""


@dataclass(frozen=True)
class Subjects:
    """What clips show."""

    sprites: Tensor
    """[images, 4, height, width]: red, green and blue times the opacity, and the opacity, each from 0 to 1."""
    captions: list[str]
    mirror: list[bool]
    groups: list[list[int]]
    """The images of each subject: one of an emoji, many of a kind of garment."""


def subject_names(limit: int | None = None) -> list[str]:
    """The captions in `clip_subjects.txt`; with a `limit`, so many emoji and so many kinds of garments."""
    names = SUBJECTS.read_text().splitlines()
    photos = [name for name in names if name.startswith("a photo")]
    return [name for name in names if name not in photos][:limit] + photos[:limit]


def ground_of(images: Tensor) -> Tensor:
    """Where emoji show their white ground: around them, and through holes. [images, 1, height, width], 0 or 1

    It spreads from the border, and from the middle of pure white areas, over all that is nearly white.
    """
    lightness = images.amin(dim=1, keepdim=True)
    nearly, white = (lightness >= NEARLY_WHITE).float(), (lightness >= WHITE).float()
    hole = max(3, HOLE * images.shape[-1] // 256 | 1)
    ground = -max_pool2d(-white, hole, stride=1, padding=hole // 2)  # white all around; beyond the border all is white
    while True:
        wider = max_pool2d(ground, 3, stride=1, padding=1) * nearly
        if torch.equal(wider, ground):
            return ground
        ground = wider


def cut_out(images: Tensor) -> Tensor:
    """The opacity of emoji: half a pixel narrower than they are, since their edge is blended with white."""
    opaque = avg_pool2d(1 - ground_of(images), 3, stride=1, padding=1, count_include_pad=False)
    return (2 * opaque - 1).clamp(min=0)


def card(size: int, device: torch.device) -> Tensor:
    """The opacity of a photograph with round corners. [1, size, size]"""
    half, radius = size / 2, size / 8
    middle = (torch.arange(size, device=device) + 0.5 - half).abs() - (half - 1 - radius)
    beyond = torch.hypot(middle.clamp(min=0)[:, None], middle.clamp(min=0)[None, :])
    return (radius - beyond + 0.5).clamp(0, 1)[None]


def caption_of(caption: str, image: NDArray[np.uint8]) -> str:
    """The first half of a clip's caption, as the demo model knows it; of a garment with its colour, if it has one."""
    prefix, _, noun = caption.partition(" of ")
    if prefix == "a photo":
        colour = colour_of(image)
        noun = f"{colour} {SAID.get(noun, noun)}" if colour else SAID.get(noun, noun)
    return f"{prefix} of {with_article(noun.lower())}"


def chosen(captions: list[str], names: list[str], most: int) -> list[int]:
    """The images of these names, at most so many of each name."""
    seen: Counter[str] = Counter()
    kept = []
    for index, caption in enumerate(captions):
        if caption in names and seen[caption] < most:
            seen[caption] += 1
            kept.append(index)
    return kept


def load_subjects(folder: Path, size: int, garments: int, device: torch.device, limit: int | None = None) -> Subjects:
    """Read the subjects for frames of `size` pixels, with at most so many `garments` of a kind.

    Raises:
        ValueError: The data lack one of the subjects.
    """
    names = subject_names(limit)
    sprite_size = int(size * SPRITE_SHARE)
    sprites: list[Tensor] = []
    captions: list[str] = []
    said: list[str] = []
    mirror: list[bool] = []
    for set_name in SETS:
        stored = read_set(folder, set_name)
        kept = chosen(stored.captions, names, garments)
        if not kept:
            continue
        images = read_images([stored.files[index] for index in kept], size)
        pixels = torch.from_numpy(np.stack(images)).to(device).permute(0, 3, 1, 2).float() / 255
        if set_name == "clothing":
            pixels = interpolate(pixels, size=sprite_size, mode="area")
            opacity = card(sprite_size, device).expand(len(pixels), 1, -1, -1)
            sprites.append(torch.cat([pixels * opacity, opacity], dim=1))
        else:
            opacity = cut_out(pixels)
            sprites.append(interpolate(torch.cat([pixels * opacity, opacity], dim=1), size=sprite_size, mode="area"))
        captions += [stored.captions[index] for index in kept]
        said += [caption_of(stored.captions[index], image) for index, image in zip(kept, images, strict=True)]
        mirror += [may_mirror(stored.captions[index], stored.classes[index]) for index in kept]
    missing = [name for name in names if name not in captions]
    if missing:
        raise ValueError(
            f"{folder} has no image of {', '.join(missing)}, which {SUBJECTS.name} names: use the whole data, or what "
            "`python -m training.pack --clips` makes of them."
        )
    groups = [[index for index, caption in enumerate(captions) if caption == name] for name in names]
    return Subjects(torch.cat(sprites), said, mirror, groups)


@dataclass(frozen=True)
class Plan:
    """What some clips show, drawn before any is rendered. All tensors are [clips]."""

    image: Tensor
    mirrored: Tensor
    motion: Tensor
    pattern: Tensor
    colour: Tensor
    chances: Tensor
    """[clips, CHANCES], from 0 to 1."""

    def __len__(self) -> int:
        return len(self.image)

    def to(self, device: torch.device) -> Plan:
        """The same, on the device."""
        return Plan(*(tensor.to(device) for tensor in self.tensors))

    def take(self, which: slice | Tensor) -> Plan:
        """Some of the clips."""
        return Plan(*(tensor[which] for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it."""
        return self.image, self.mirrored, self.motion, self.pattern, self.colour, self.chances


def full_caption(subject: str, motion: str, pattern: str, colour: str) -> str:
    """What is said of a clip.

    Example:
        >>> full_caption("3d emoji of a red apple", "moving left", "plain", "blue")
        '3d emoji of a red apple, moving left over a plain blue ground'
    """
    return f"{subject}, {motion} over a {pattern} {colour} ground"


def draw_plan(subjects: Subjects, count: int, seed: int) -> Plan:
    """So many clips: every subject equally often, with every motion, and over all grounds."""
    chance = random.Random(seed)
    rows = []
    for index in range(count):
        image = chance.choice(subjects.groups[index % len(subjects.groups)])
        mirrored = subjects.mirror[image] and chance.random() < 0.5
        motion, colour = chance.randrange(len(MOTIONS)), chance.randrange(len(COLOURS))
        (pattern,) = chance.choices(range(len(PATTERNS)), PATTERN_SHARES)
        rows.append((image, mirrored, motion, pattern, colour))
    columns = torch.tensor(rows).unbind(dim=1)
    chances = torch.rand(count, CHANCES, generator=torch.Generator().manual_seed(seed))
    return Plan(*(*columns, chances))


def captions_of(plan: Plan, subjects: Subjects) -> list[str]:
    """What is said of each clip."""
    rows = torch.stack([plan.image, plan.motion, plan.pattern, plan.colour], dim=1).tolist()
    colours = list(COLOURS)
    return [
        full_caption(subjects.captions[image], MOTIONS[motion], PATTERNS[pattern], colours[colour])
        for image, motion, pattern, colour in rows
    ]


def paths(plan: Plan, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the subject is, half its width and height, and its angle. [clips, frames, 2], then [clips, frames]

    Each at its `time`, from 0 at the beginning of the clip to 1 at its end, [frames] or [clips, frames].

    Positions and sizes are shares of half the frame, from -1 at the left and the top; an angle above 0 is turned to the
    left.
    """
    x, y, size, speed = plan.chances[:, :4, None].unbind(dim=1)  # each [clips, 1]
    size = 0.42 + 0.12 * size
    along = (0.4 + 0.15 * speed) * (2 * time - 1)  # [clips, frames]
    aside_x, aside_y = 0.3 * (2 * x - 1), 0.3 * (2 * y - 1)
    turn = (2 / 3 + 0.5 * speed) * math.pi * time
    larger, smaller = (0.24 + (0.3 + 0.12 * speed) * share for share in (time, 1 - time))
    hop = 0.4 - 0.8 * (2 * math.pi * time).sin().abs()
    positions = torch.stack([aside_x + 0 * time, aside_y + 0 * time], dim=-1)
    sizes, angles = size + 0 * time, 0 * (size + time)
    for number, motion in enumerate(MOTIONS):
        now = (plan.motion == number)[:, None]
        if motion in ("moving left", "moving right"):
            moved = -along if motion == "moving left" else along
            positions[..., 0] = torch.where(now, moved, positions[..., 0])
        elif motion in ("moving up", "moving down"):
            moved = -along if motion == "moving up" else along
            positions[..., 1] = torch.where(now, moved, positions[..., 1])
        elif motion in ("turning left", "turning right"):
            angles = torch.where(now, turn if motion == "turning left" else -turn, angles)
        elif motion in ("growing", "shrinking"):
            sizes = torch.where(now, larger if motion == "growing" else smaller, sizes)
        elif motion == "bouncing":
            positions[..., 1] = torch.where(now, hop, positions[..., 1])
    return positions, sizes, angles


def whole_clip(frames: int, device: torch.device) -> Tensor:
    """The times of its frames. [frames]"""
    return torch.linspace(0, 1, frames, device=device)


def grounds(plan: Plan, size: int) -> Tensor:
    """What is behind the subject. [clips, 3, size, size]"""
    device = plan.chances.device
    colours = torch.tensor(list(COLOURS.values()), device=device, dtype=torch.float32) / 255
    colour = colours[plan.colour]
    # A lighter shade beside it; of white, which has none, a darker one.
    lighter = torch.where((plan.colour == 0)[:, None], colour * 0.78, torch.lerp(colour, torch.ones_like(colour), 0.55))
    period = (0.14 + 0.08 * plan.chances[:, 4])[:, None, None]  # of the frame
    line = (torch.arange(size, device=device) + 0.5) / size
    y, x = line[None, :, None], line[None, None, :]
    phase = plan.chances[:, 5, None, None]
    soft = size * period / 2  # an edge is as wide as a pixel or two
    across, down = x / period + phase, y / period + phase

    def wave(position: Tensor) -> Tensor:
        return (2 * math.pi * position).sin()

    dots = 0.3 - torch.hypot(across % 1 - 0.5, down % 1 - 0.5)
    shares = {
        "striped": (0.5 + soft * wave((x + y) / period / 2 + phase) / 4).clamp(0, 1),
        "checkered": (0.5 + soft * wave(across / 2) * wave(down / 2) / 4).clamp(0, 1),
        "dotted": (0.5 + soft * dots).clamp(0, 1),
        "gradient": (y + 0 * x).expand(len(plan), -1, -1),
    }
    share = torch.zeros(len(plan), size, size, device=device)
    for name, values in shares.items():
        share = torch.where((plan.pattern == PATTERNS.index(name))[:, None, None], values, share)
    return torch.lerp(colour[..., None, None], lighter[..., None, None], share[:, None])


def render(plan: Plan, sprites: Tensor, time: Tensor, size: int) -> Tensor:
    """The clips at these times, from -1 to 1 as autoencoders take them. [clips, frames, 3, size, size]"""
    positions, sizes, angles = paths(plan, time)
    frames = time.shape[-1]
    cos, sin = angles.cos(), angles.sin()
    back = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2) / sizes[..., None, None]
    back[..., 0, :] *= (1 - 2 * plan.mirrored.float())[:, None, None]
    theta = torch.cat([back, -back @ positions[..., None]], dim=-1).flatten(0, 1)  # [clips · frames, 2, 3]
    grid = affine_grid(theta, [len(theta), 4, size, size], align_corners=False)
    shown = sprites[plan.image].repeat_interleave(frames, dim=0)
    shown = grid_sample(shown, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    behind = grounds(plan, size).repeat_interleave(frames, dim=0)
    images: Tensor = shown[:, :3] + behind * (1 - shown[:, 3:])
    clips: Tensor = (2 * images.clamp(0, 1) - 1).unflatten(0, (len(plan), frames))
    return clips
