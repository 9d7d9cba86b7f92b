"""The table in the paper's layout."""

from toma_lab.columns import BASELINE, NOISE_FLOOR, Column, parse_shortcut
from toma_lab.columns.ours import Ours
from toma_lab.report.paper_table import paper_table

from toma_diffusion import Merge
from toma_diffusion.others import ToMeSD

COLUMNS = (
    Column(BASELINE),
    Column(NOISE_FLOOR),
    Column("toma", Ours(merge=Merge(ratio=0.25))),
    Column("toma", Ours(merge=Merge(ratio=0.5))),
    Column("toma", Ours(merge=Merge(ratio=0.5, num_regions=16)), ("num_regions",)),
    Column("tomesd", Ours(merge=ToMeSD(ratio=0.5))),
)


def row(column: Column, **figures: float) -> dict[str, str]:
    return column.key | {name: str(value) for name, value in figures.items()}


ROWS = [
    row(COLUMNS[0], seconds=4.0, speedup=1.0),
    row(COLUMNS[1], seconds=4.0, speedup=1.0, psnr=90, lpips=0.0),
    row(COLUMNS[2], seconds=3.5, speedup=1.14, psnr=30, lpips=0.05),
    row(COLUMNS[3], seconds=3.0, speedup=1.33, psnr=25, lpips=0.1),
    row(COLUMNS[4], seconds=3.1, speedup=1.29, psnr=24, lpips=0.08),
    row(COLUMNS[5], seconds=3.9, speedup=1.03, psnr=25.001, lpips=0.2),
]


def best_of(table, method):
    (found,) = [each for each in table.methods if each.title == method]
    return [
        {column: cell.text for column, cell in zip(table.columns, line.cells, strict=True) if cell.best}
        for line in found.lines
    ]


def test_methods_with_their_ratios_and_only_columns_that_hold_something():
    table = paper_table(COLUMNS, ROWS)
    assert table.headings == ("PSNR ↑", "LPIPS ↓", "Sec/img ↓", "Speed-up ↑")
    assert [(method.title, [line.point for line in method.lines]) for method in table.methods] == [
        ("baseline", [""]),
        ("noise floor", [""]),
        ("toma", ["0.25", "0.5"]),
        ("toma, num_regions=16", ["0.5"]),
        ("tomesd", ["0.5"]),
    ]
    assert [cell.text for cell in table.methods[0].lines[0].cells] == ["–", "–", "4.00", "1.00"]


def test_the_best_of_each_ratio_is_marked_among_merged_methods_alone():
    table = paper_table(COLUMNS, ROWS)
    assert best_of(table, "baseline") == best_of(table, "noise floor") == [{}]
    # Nothing else was run at 0.25; at 0.5 a PSNR that reads the same is as good.
    assert best_of(table, "toma") == [{}, {"psnr": "25.00", "seconds": "3.00", "speedup": "1.33"}]
    assert best_of(table, "toma, num_regions=16") == [{"lpips": "0.080"}]
    assert best_of(table, "tomesd") == [{"psnr": "25.00"}]


def test_shortcuts_are_one_method_over_their_knob_and_no_rivals_of_merging():
    fewer = [Column("steps", shortcuts=(parse_shortcut(f"steps:{steps}"),)) for steps in (16, 14)]
    both = Column("toma", Ours(merge=Merge(ratio=0.5)), shortcuts=fewer[0].shortcuts)
    rows = [row(each, seconds=3.0, speedup=1.3, psnr=35) for each in (*fewer, both)]
    table = paper_table((*COLUMNS, *fewer, both), [*ROWS, *rows])
    assert [(method.title, [line.point for line in method.lines]) for method in table.methods[5:]] == [
        ("fewer steps", ["16", "14"]),
        ("toma, + 16 steps", ["0.5"]),
    ]
    assert best_of(table, "fewer steps") == [{}, {}]
    assert best_of(table, "toma, + 16 steps") == [{}]


def test_computed_gains_have_a_column_and_measured_ones_are_the_speed_up():
    assert "Gain ↑" not in paper_table(COLUMNS, ROWS).headings
    assert [line.gain for line in paper_table(COLUMNS, ROWS).methods[2].lines] == [1.14, 1.33]
    computed = [each | {"gain": "1.5", "gain_source": "sdxl"} for each in ROWS]
    table = paper_table(COLUMNS, computed)
    assert (table.headings[-1], table.time_of, table.methods[2].lines[0].gain) == ("Gain ↑", "sdxl", 1.5)
