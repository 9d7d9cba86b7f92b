"""Images on one sheet."""

from PIL import Image
from toma_lab.report.pictures import GAP, make_sheet


def test_images_stand_in_rows_with_their_captions_below():
    colors = ("red", "lime", "blue")
    sheet = make_sheet([Image.new("RGB", (64, 48), color) for color in colors], ["one", "two × 2", "a\nb\nc"], 2)
    assert sheet.width == 2 * (64 + GAP) + GAP
    row = (sheet.height - GAP) // 2
    corners = [(GAP, GAP), (GAP + 64 + GAP, GAP), (GAP, GAP + row)]
    assert [sheet.getpixel(corner) for corner in corners] == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    caption = sheet.crop((GAP, GAP + 48, GAP + 64, GAP + row - GAP)).convert("L")
    assert caption.getextrema()[0] < 100  # ink
    assert sheet.getpixel((sheet.width - 1, sheet.height - 1)) == (255, 255, 255)


def test_long_captions_are_wrapped_and_other_sizes_fitted():
    short = make_sheet([Image.new("RGB", (64, 64)), Image.new("RGB", (32, 32))], ["a", "b"], 2)
    long = make_sheet([Image.new("RGB", (64, 64)), Image.new("RGB", (32, 32))], ["a", "many words " * 5], 2)
    assert long.width == short.width
    assert long.height > short.height
