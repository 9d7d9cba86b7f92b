"""The training loop of every stage: it follows the clock, averages the weights, and survives being killed."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.progress import Progress
from training.settings import Settings

HISTORY = "training.json"
"""In an exported pipeline: what it went through, stage by stage."""
COLUMNS = ("step", "loss", "images_per_second", "learning_rate", "seconds")
STEPS_BETWEEN_ROWS = 20
"""Reading the loss waits for the GPU; in between the CPU runs ahead of it."""


@dataclass(frozen=True)
class Budget:
    """When training ends: after so many minutes over all its runs, or so many steps, whichever comes first."""

    minutes: float
    steps: int | None = None

    def done(self, step: int, seconds: float, setup: float = 0.0) -> float:
        """The fraction that is behind us, of what is left without the seconds of `setup`."""
        left = 60 * self.minutes - setup
        by_clock = (seconds - setup) / left if left > 0 else 1.0
        return max(by_clock, step / self.steps if self.steps else 0.0)


@dataclass(frozen=True)
class Place:
    """Where a stage keeps its files, what it runs on, and whether it compiles its networks."""

    work: Path
    device: torch.device
    compile: bool = False
    checkpoint_seconds: float = 60.0
    start: Path | None = None
    """An exported model whose networks to train further, in place of new ones."""
    text: Path | None = None
    """An exported pipeline whose vocabulary and text encoder to use as they are, in place of new ones."""

    def autocast(self, cache: bool = True) -> torch.autocast:
        """Half precision where it is fast. With a `cache`, weights are converted once, with or without gradients."""
        on_gpu = self.device.type == "cuda"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=cache)


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Whoever is killed while writing leaves the old file, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    write(unfinished)
    os.replace(unfinished, path)


def learning_rate(peak: float, step: int, warmup_steps: int, done: float) -> float:
    """Up in a line by steps, down a cosine to zero by the fraction `done` of the time."""
    return peak * min(1.0, (step + 1) / warmup_steps) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


@dataclass(eq=False)
class Training:
    """The state of one stage: networks, optimizer, averaged weights, random numbers, step and time spent."""

    name: str
    model: nn.Module
    settings: Settings
    peak_rate: float
    batch: int
    """Images a step. It may change from one to the next."""
    place: Place
    setup_steps: int = 1
    """Of every run: the first steps, in which networks are compiled."""
    step: int = 0
    images: int = 0
    seconds: float = 0.0
    setup: float = 0.0
    """Seconds of these steps: of those the learning rate knows nothing. Once compiling took 140 of 312 seconds, and the
    rate was half down before it was up."""
    weights: dict[str, nn.Parameter] = field(init=False)
    """Those that are trained, by name."""
    optimizer: torch.optim.Optimizer = field(init=False)
    average: dict[str, Tensor] = field(init=False)
    generator: torch.Generator = field(init=False)
    rows: list[dict[str, float]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.model.to(self.place.device)
        self.weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.weights.values(),
            lr=self.peak_rate,
            betas=(0.9, 0.99),
            weight_decay=self.settings.weight_decay,
            fused=self.place.device.type == "cuda",
        )
        self.average = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.generator = torch.Generator(self.place.device).manual_seed(self.settings.seed)
        if self.checkpoint.exists():
            self.restore(torch.load(self.checkpoint, map_location="cpu", weights_only=True))

    @property
    def checkpoint(self) -> Path:
        """The file to go on from."""
        return self.place.work / f"{self.name}.pt"

    @property
    def log(self) -> Path:
        """The rows, as CSV."""
        return self.place.work / f"{self.name}.csv"

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was made. Rows written after it are dropped: their steps come again."""
        if state["settings"] != self.settings.to_dict():
            raise ValueError(f"{self.checkpoint} was trained with other settings. Use another --work or delete it.")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, weight in self.average.items():
            weight.copy_(state["average"][name])
        self.generator.set_state(state["generator"])
        for name in ("step", "images", "seconds", "setup", "rows"):
            setattr(self, name, state[name])

    def save(self) -> None:
        """Write the checkpoint, then the log: killed in between, the log is behind, never ahead of the next run."""
        state = {
            "settings": self.settings.to_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average,
            "generator": self.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
            "setup": self.setup,
            "images": self.images,
            "rows": self.rows,
        }
        write_atomically(self.checkpoint, lambda path: torch.save(state, path))
        write_atomically(self.log, self.write_rows)

    def write_rows(self, path: Path) -> None:
        """All rows so far."""
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    @torch.no_grad()
    def update_average(self) -> None:
        """Exponential moving average; short at first, when the weights still change much."""
        decay = min(self.settings.ema_decay, (1 + self.step) / (10 + self.step))
        weights = [weight.detach() for weight in self.weights.values()]
        torch._foreach_lerp_(list(self.average.values()), weights, 1 - decay)

    def advance(self, loss_of: Callable[[torch.Generator], Tensor], rate: float) -> Tensor:
        """One step of the optimizer. Returns the loss, still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.place.autocast():
            loss = loss_of(self.generator)
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.images += self.batch
        self.update_average()
        return loss.detach()

    def run(self, loss_of: Callable[[torch.Generator], Tensor], budget: Budget) -> None:
        """Train until the budget is spent, with a checkpoint now and then and one at the end.

        Time counts from here, compilation included, and is taken up from the checkpoint: a training of ten minutes that
        is killed and started again ends after ten minutes of training, and always at a learning rate of zero.
        """
        if budget.done(self.step, self.seconds) >= 1:
            print(f"{self.name}: finished already, at step {self.step}", flush=True)
            return
        before, setup_before, started = self.seconds, self.setup, time.monotonic()
        setup_end = self.step + self.setup_steps
        saved = row_time = started
        row_step, row_images, losses = self.step, self.images, torch.zeros((), device=self.place.device)
        if self.step:
            spent = f"{self.seconds / 60:.1f} of {budget.minutes:g} min spent"
            print(f"{self.name}: going on at step {self.step}, {spent}", flush=True)
        with Progress(self.name) as progress:
            while budget.done(self.step, self.seconds) < 1:
                done = budget.done(self.step, self.seconds, self.setup)
                rate = learning_rate(self.peak_rate, self.step, self.settings.warmup_steps, done)
                losses += self.advance(loss_of, rate)
                if self.step <= setup_end:
                    losses.item()  # waits for the device
                    self.setup = setup_before + time.monotonic() - started
                now = time.monotonic()
                self.seconds = before + now - started
                last = budget.done(self.step, self.seconds) >= 1
                if not last and self.step - row_step < STEPS_BETWEEN_ROWS:
                    continue
                loss = losses.item() / (self.step - row_step)
                if not math.isfinite(loss):
                    raise FloatingPointError(f"{self.name}: the loss is {loss} at step {self.step}; lower the rate.")
                now = time.monotonic()
                self.seconds = before + now - started
                speed = (self.images - row_images) / (now - row_time)
                row = (self.step, round(loss, 6), round(speed, 1), round(rate, 8), round(self.seconds, 1))
                self.rows.append(dict(zip(COLUMNS, row, strict=True)))
                progress.update(
                    budget.done(self.step, self.seconds),
                    f"step {self.step}, loss {loss:.4f}, {speed:.0f} images/s, rate {rate:.1e}",
                )
                row_time, row_step, row_images = now, self.step, self.images
                losses.zero_()
                if now - saved >= self.place.checkpoint_seconds:
                    self.save()
                    saved = time.monotonic()
        self.save()


def averaged(model: nn.Module, checkpoint: Path) -> dict[str, Any]:
    """Load the averaged weights of a finished stage into `model`, ready for use. Returns the rest of the checkpoint."""
    if not checkpoint.exists():
        raise FileNotFoundError(f"There is no {checkpoint}: run the stage {checkpoint.stem} first.")
    state: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"] | state["average"])
    model.eval().requires_grad_(False)
    return state
