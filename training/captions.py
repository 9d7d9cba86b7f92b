"""From the data's labels to what people type: other wordings, articles, colours; and which images may be mirrored."""

from __future__ import annotations

import random
import re
from collections import Counter

import numpy as np
from numpy.typing import NDArray

SKIN_TONE = re.compile(r", ((?:medium-)?(?:light|dark)|medium) skin tone$")
HANDED = re.compile(r"left|\bright|clock|thirty|writing|\bmap\b|globe|moon")
"""Mirrored, these would show something else than they say."""
HANDED_CLASSES = ("Symbols", "Flags")
"""Letters, digits, arrows and flags."""

OTHER_NAMES = {
    "longsleeve": ("longsleeve", "long-sleeved shirt", "long sleeve shirt", "sweater"),
    "outwear": ("outwear", "outerwear", "jacket", "coat"),
    "undershirt": ("undershirt", "tank top"),
    "body": ("body", "bodysuit", "romper"),
    "polo": ("polo", "polo shirt"),
    "pants": ("pants", "trousers"),
    "t-shirt": ("t-shirt", "t-shirt", "tshirt"),
}
"""The clothing set's labels are those of a shop; a person would not say "outwear"."""
PLURALS = ("pants", "trousers", "shoes", "shorts", "gloves", "socks", "glasses", "eyes", "hands")

SHADES = (
    ("red", (170, 25, 35)),
    ("red", (215, 60, 45)),
    ("orange", (225, 120, 40)),
    ("yellow", (225, 195, 60)),
    ("green", (50, 120, 60)),
    ("green", (45, 75, 55)),
    ("blue", (40, 75, 150)),
    ("blue", (40, 50, 85)),
    ("blue", (85, 110, 145)),
    ("light blue", (140, 175, 210)),
    ("purple", (100, 60, 130)),
    ("pink", (225, 140, 160)),
    ("brown", (105, 70, 50)),
    ("beige", (205, 185, 160)),
    ("black", (28, 28, 32)),
    ("grey", (85, 85, 88)),
    ("grey", (135, 135, 138)),
    ("white", (225, 225, 228)),
)
"""The nearest one names a pixel. Navy and denim are blue to whoever types a prompt."""


def clean(caption: str) -> str:
    """Lower case, plain quotes, and "man: curly hair" as "man with curly hair"."""
    caption = caption.lower().replace("’", "'").replace("“", "").replace("”", "")
    caption = re.sub(r"^(.*\b(?:man|woman|person)): bald\b", r"\1, bald", caption)
    caption = re.sub(r"^(.*\b(?:man|woman|person)): ", r"\1 with ", caption)
    return caption.replace(": ", " ")


def concept(caption: str) -> str:
    """What is shown, without the skin tone: images of one concept share its weight."""
    return SKIN_TONE.sub("", clean(caption))


def may_mirror(caption: str, class_name: str) -> bool:
    """Whether the mirrored image still shows what the caption says.

    Example:
        >>> may_mirror("3d emoji of red apple", "Food & Drink"), may_mirror("3d emoji of left arrow", "Symbols")
        (True, False)
    """
    return class_name not in HANDED_CLASSES and HANDED.search(clean(caption)) is None


def colour_of(image: NDArray[np.uint8]) -> str | None:
    """The colour's name if one fills most of the image's middle, where a garment lies, and None if there is no such."""
    height, width, _ = image.shape
    middle = image[height * 3 // 8 : height * 5 // 8 : 4, width * 3 // 8 : width * 5 // 8 : 4].reshape(-1, 3)
    palette = np.array([shade for _, shade in SHADES], dtype=np.float32)
    distance = ((middle[:, None].astype(np.float32) - palette) ** 2).sum(-1)  # [pixels, shades]
    name, count = Counter(SHADES[index][0] for index in distance.argmin(-1)).most_common(1)[0]
    return name if count >= 0.6 * len(middle) else None


def with_article(noun: str) -> str:
    """Put "a" or "an" before what can be counted.

    Example:
        >>> with_article("axe"), with_article("kids shoes")
        ('an axe', 'kids shoes')
    """
    if noun.split(",")[0].endswith(PLURALS):
        return noun
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def variant(caption: str, colour: str | None, chance: random.Random) -> str:
    """One wording of a caption, as people might type it. `colour` is said half of the time, where there is one."""
    caption = clean(caption)
    prefix, _, noun = caption.partition(" of ")
    words = noun.split(" ")
    if prefix == "a photo":
        words[-1] = chance.choice(OTHER_NAMES.get(words[-1], (words[-1],)))
        if colour is not None and chance.random() < 0.5:
            words.insert(0, colour)
    noun = " ".join(words)
    if chance.random() < 0.3:
        noun = SKIN_TONE.sub(r" with \1 skin", noun)
    if chance.random() < 0.5:
        noun = with_article(noun)
    if chance.random() < 0.1:
        return noun if prefix == "a photo" else f"{noun} emoji"
    if prefix != "a photo" and chance.random() < 0.2:
        prefix = f"a {prefix}"
    return f"{prefix} of {noun}"
