"""The prompts of a run: from a text file, a CSV file, the class names of ImageNet, or ours."""

from __future__ import annotations

import csv
from pathlib import Path

from toma_diffusion.errors import UsageError
from toma_lab.pipelines.checkpoints import DEMO_MODELS, VIDEO

IMAGENET = "imagenet"
IMAGENET_TEMPLATE = "a photo of a {}"
PAPER_SEEDS = (0, 1, 2)
PAPER_PROMPTS = 50
"""From a list such as GEMRec's. Of ImageNet's class names the paper uses all."""


DEMO_PROMPTS = (
    "3d emoji of a red apple",
    "a photo of blue pants",
    "3d emoji of smiling face with sunglasses",
    "a photo of a t-shirt",
    "3d emoji of a rocket",
    "a photo of a black dress",
    "3d emoji of a cat",
    "a photo of a sneaker",
    "3d emoji of a guitar",
    "a photo of a green coat",
    "3d emoji of a house",
    "a photo of a bag",
)
"""For the demo models of images, which were trained on emoji and photographs of clothes."""
PROMPTS = (
    "a photo of an astronaut riding a horse",
    "a bowl of fresh fruit on a wooden table, morning light",
    "a watercolor painting of a harbor with fishing boats",
    "portrait of an old fisherman with a grey beard",
    "a narrow street in an old town at night, wet cobblestones",
    "a close-up photo of a bee on a lavender flower",
    "a red sports car parked in front of a modern building",
    "an oil painting of mountains above a lake",
    "a steaming cup of coffee next to an open book",
    "a small robot watering plants in a greenhouse",
    "a golden retriever running on a beach",
    "a poster that shows a lighthouse, flat design",
    "a crowd at an outdoor concert at dusk",
    "a knitted sweater on a wooden chair",
    "an aerial photo of terraced rice fields",
    "a glass chess set on a marble board",
    "a child flying a kite on a windy hill",
    "a snowy forest with a wooden cabin",
    "a plate of sushi on a black table",
    "a portrait of a young woman with freckles, soft light",
    "an isometric drawing of a tiny island with a castle",
    "a bicycle leaning against a brick wall",
    "a macro photo of a circuit board",
    "hot air balloons over a valley at sunrise",
    "a black and white photo of a jazz musician",
    "a market stall with spices of many colors",
    "a tiger resting in tall grass",
    "a stained glass window with a peacock",
    "a spaceship above a desert planet",
    "a train crossing a stone viaduct in autumn",
    "a shelf with old cameras",
    "a cartoon fox reading a newspaper",
)
"""For every other model: photographs, paintings, faces, fine detail, large plain areas."""
CLIP_PROMPTS = (
    "a golden retriever runs along a beach, waves roll in behind it",
    "a steaming cup of coffee on a table, the camera moves slowly around it",
    "a train crosses a stone viaduct in autumn, seen from the air",
    "an old fisherman laughs and looks at the sea, close-up",
    "raindrops fall on a narrow street at night, people walk past with umbrellas",
    "a small robot waters plants in a greenhouse",
    "a hot air balloon rises over a valley at sunrise",
    "a jazz musician plays the saxophone on a stage, black and white",
)
"""For models of clips: motion of things, of water and of the camera, faces, calm pictures."""
DEMO_CLIP_PROMPTS = (
    "3d emoji of a butterfly, moving up over a dotted blue ground",
    "3d emoji of a bus, moving left over a checkered white ground",
    "3d emoji of a star, growing over a gradient blue ground",
    "a photo of blue pants, standing still over a dotted pink ground",
    "3d emoji of a fox, bouncing over a gradient grey ground",
    "3d emoji of a crown, turning right over a plain purple ground",
    "3d emoji of a cactus, shrinking over a plain red ground",
    "3d emoji of a frog, moving up over a striped yellow ground",
)
"""For the demo model of clips: subjects, motions and grounds that it was trained on."""


def load_prompts(source: str, template: str = "") -> tuple[str, ...]:
    """The prompts of a run.

    Args:
        source: a text file with one prompt per line; a CSV file with a column `prompt`, such as GEMRec's; or
            `imagenet`, the 1000 class names of ImageNet-1K.
        template: a text in which `{}` is replaced by the prompt, for files of class names.
    """
    if source == IMAGENET:
        prompts, template = _imagenet(), template or IMAGENET_TEMPLATE
    else:
        path = Path(source)
        if not path.is_file():
            raise UsageError(f"prompts {source!r}: there is no such file. Give a .txt or .csv file, or {IMAGENET!r}.")
        try:
            prompts = _from_csv(path) if path.suffix.lower() == ".csv" else _from_lines(path)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"prompts {source!r}: the file cannot be read as UTF-8 text or CSV ({error}).") from error
    if template and "{}" not in template:
        raise UsageError(f"template {template!r} has no {{}}, which is replaced by the prompt.")
    prompts = tuple(dict.fromkeys(prompts))  # a second time would give the same image
    return tuple(template.replace("{}", prompt) for prompt in prompts) if template else prompts


def paper_protocol(source: str, prompts: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Prompts and seeds as in the paper: three images of each class of ImageNet, or of 50 prompts."""
    if source == IMAGENET:
        return prompts, PAPER_SEEDS
    if len(prompts) < PAPER_PROMPTS:
        raise UsageError(f"the paper's protocol needs {PAPER_PROMPTS} prompts, {source!r} has {len(prompts)}.")
    return prompts[:PAPER_PROMPTS], PAPER_SEEDS


def _from_lines(path: Path) -> tuple[str, ...]:
    prompts = tuple(line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip())
    if not prompts:
        raise UsageError(f"prompts {str(path)!r}: the file is empty. Write one prompt per line.")
    return prompts


def _from_csv(path: Path) -> tuple[str, ...]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        column = next((name for name in reader.fieldnames or () if name.strip().lower() == "prompt"), None)
        if column is None:
            columns = ", ".join(reader.fieldnames or ()) or "none"
            raise UsageError(f"prompts {str(path)!r} has no column 'prompt'. Its columns: {columns}.")
        prompts = tuple((row[column] or "").strip() for row in reader)
    if not any(prompts):
        raise UsageError(f"prompts {str(path)!r}: the column {column!r} is empty.")
    return tuple(prompt for prompt in prompts if prompt)


def _imagenet() -> tuple[str, ...]:
    """From torchvision, which has them without a download."""
    try:
        from torchvision.models import AlexNet_Weights
    except Exception as error:  # not installed, or one that does not fit torch
        raise UsageError(
            f"prompts {IMAGENET!r}: the class names come with torchvision, which cannot be imported here ({error}). "
            "Install it, or give a file with one class name per line: "
            f"--prompts FILE --template {IMAGENET_TEMPLATE!r}."
        ) from error
    return tuple(AlexNet_Weights.DEFAULT.meta["categories"])


def built_in_prompts(model: str, *, clips: bool = False) -> tuple[str, ...]:
    """Those that suit a model of images or of clips."""
    if clips:
        return DEMO_CLIP_PROMPTS if model == VIDEO else CLIP_PROMPTS
    return DEMO_PROMPTS if model in DEMO_MODELS else PROMPTS
