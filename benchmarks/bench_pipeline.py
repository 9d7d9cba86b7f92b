"""Time whole pipelines whose denoiser is compiled as a whole: what a user gets from `handle.compile("graphs")`.

    python benchmarks/bench_pipeline.py [--model sdxl] [--methods toma-stage,balanced] [--output FILE] [--commit COMMIT]

`toma bench --pipeline` compiles one method after another, several minutes each. Here every method has a process of its
own: all compile at once, and then they are timed one at a time, the baseline first and last. Without a GPU it runs
small models, to try it out.

With --take-turns it waits for others before it times anything, but others do not wait while it compiles.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from toma_lab.bench.group import BASELINE, Group
from toma_lab.bench.measure import Measured, attention_of, measure
from toma_lab.bench.pipelines import RandomPipeline
from toma_lab.bench.runner import note_drift, row_of
from toma_lab.bench.turns import Turns
from toma_lab.bench.zoo import Denoiser, build
from toma_lab.columns import Column, ColumnSpec, columns_of
from toma_lab.facts import gather_facts
from toma_lab.folder import locked
from toma_lab.parsing import Resolution, split_list
from toma_lab.rows import Rows

READY, GO = "ready", "go"


class Told(Turns):
    """The turn comes when the parent process says so."""

    def __init__(self, parent: Connection) -> None:
        super().__init__()
        self.parent = parent

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Say that everything is compiled, and wait."""
        self.parent.send(READY)
        if self.parent.recv() != GO:
            raise RuntimeError("the parent process ended the benchmark")
        yield


def denoiser_of(options: argparse.Namespace) -> Denoiser:
    """Without weights as yet."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return build(options.model, small=device.type == "cpu", device=device)


def group_of(options: argparse.Namespace, denoiser: Denoiser) -> Group:
    """What all methods have in common."""
    default_size = "x".join(map(str, denoiser.default_size[:2]))
    resolution = Resolution.parse(options.resolution or default_size, denoiser.family.multiple)
    dtype = str(denoiser.dtype).removeprefix("torch.")
    return Group(denoiser.name, resolution, denoiser.default_batch, "compiled", options.compile, options.steps, dtype)


def time_column(parent: Connection, options: argparse.Namespace, column: Column) -> None:
    """In a process of its own: compile, wait for the turn, time, and send the result or the error."""
    try:
        denoiser = denoiser_of(options)
        denoiser.materialize()
        around = RandomPipeline(options.model, denoiser, small=denoiser.device.type == "cpu")
        found: Measured | str = measure(
            denoiser,
            group_of(options, denoiser),
            column,
            repeats=options.repeats,
            end_to_end=around,
            turns=Told(parent),
            stage=lambda text: print(f"{text} {column.name}", flush=True),
        )
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    parent.send(found)


@dataclass
class Child:
    """A process, and what it sent."""

    column: Column
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    found: Measured | str = ""

    def receive(self) -> bool:
        """Wait for its next message. False if it was the last one, which `found` then is."""
        try:
            message = self.pipe.recv()
        except EOFError:
            message = "the process died"
        if message == READY:
            return True
        self.found = message
        return False


def children_of(options: argparse.Namespace, columns: list[Column]) -> list[Child]:
    """One process a column, already compiling."""
    context = multiprocessing.get_context("spawn")
    children = []
    for column in columns:
        ours, theirs = context.Pipe()
        process = context.Process(target=time_column, args=(theirs, options, column), daemon=True)
        process.start()
        theirs.close()
        children.append(Child(column, process, ours))
    return children


def run(options: argparse.Namespace) -> int:
    """Measure all, and write their rows. Returns how many failed."""
    denoiser = denoiser_of(options)
    group, facts = group_of(options, denoiser), gather_facts(denoiser.device, options.commit)
    specs = [ColumnSpec.parse(text) for text in split_list(options.methods)]
    methods = columns_of(denoiser.model, specs, [options.ratio])
    lock = options.output.with_name(f".{options.output.name}.lock")
    message = f"another benchmark is writing {str(options.output)!r}"
    with locked(lock, message), Turns(options.take_turns) as turns:
        rows = Rows(options.output)
        children = children_of(options, [BASELINE, *methods, BASELINE])
        waiting = [child for child in children if child.receive()]
        print(f"{len(waiting)} of {len(children)} are compiled.", flush=True)
        measured: dict[Column, Measured] = {}
        first_row = len(rows)
        with turns.alone():
            for child in waiting:
                child.pipe.send(GO)
                child.receive()
                found, is_again = child.found, child.column in measured
                if not isinstance(found, Measured):
                    continue
                step, image = found.timing.median, found.pipeline_s
                print(f"{child.column.name}: {step:.2f} ms a step, {image:.3f} s an image", flush=True)
                if is_again:
                    note_drift(rows, first_row, measured[BASELINE], found)
                    continue
                measured[child.column] = found
                if BASELINE in measured:
                    rows.add(row_of(group, child.column, {}, measured, facts, attention_of(denoiser.model)))
    failed = [child for child in children if not isinstance(child.found, Measured)]
    for child in failed:
        print(f"Failed: {child.column.name} ({group}): {child.found}")
    return len(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdxl")
    parser.add_argument("--methods", default="toma-stage,balanced", help="as in toma bench")
    parser.add_argument("--ratio", type=float, default=0.5, help="of the tokens that are removed, where any are")
    parser.add_argument("--compile", choices=("graphs", "whole", "block"), default="graphs")
    parser.add_argument("--resolution", default="", help="default: that of the model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="")
    parser.add_argument("--take-turns", type=Path, help="lock file that benchmarks on one GPU share")
    parser.add_argument("--output", type=Path, default=Path("pipeline.csv"), help="CSV file to append to")
    parser.add_argument("--commit", help="to record; default: that of the checkout")
    sys.exit(1 if run(parser.parse_args()) else 0)


if __name__ == "__main__":
    main()
