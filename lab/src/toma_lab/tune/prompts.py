"""Built-in prompts, and the images of a search: a prompt and a seed each."""

from __future__ import annotations

from collections.abc import Sequence

from toma_lab.evaluation.plan import Item
from toma_lab.pipelines.checkpoints import DEMO_MODELS, VIDEO

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


def items_of(prompts: Sequence[str], count: int) -> list[Item]:
    """So many images or clips. If there are fewer prompts, they come again with another seed."""
    return [
        Item(index % len(prompts), prompts[index % len(prompts)], seed=index // len(prompts)) for index in range(count)
    ]


def built_in_prompts(model: str, *, clips: bool = False) -> tuple[str, ...]:
    """Those that suit a model of images or of clips."""
    if clips:
        return DEMO_CLIP_PROMPTS if model == VIDEO else CLIP_PROMPTS
    return DEMO_PROMPTS if model in DEMO_MODELS else PROMPTS
