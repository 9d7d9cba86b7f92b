import pytest, torch
from tiny_comfy import FAMILIES, sample
@pytest.mark.parametrize("family", FAMILIES)
def test_try(loaded_nodes, family):
    model = FAMILIES[family].make()
    first = sample(model, family)
    assert torch.isfinite(first).all() and first.std() > 0
    print(family, first.std())
    node = loaded_nodes["ToMAAccelerateModel"]
    from toma_diffusion.integrations.comfyui.nodes import accelerate, report
    for preset in ("toma-stage","toma-tile","toma-once","reuse","balanced","fast"):
        clone, text = accelerate(model, preset, -1.0, -1.0, -1.0, "as in the preset")
        out = sample(clone, family, steps=8)
        print((out-sample(model, family, steps=8)).abs().mean(), report(clone, None)[0])
        assert torch.equal(first, sample(model, family))
