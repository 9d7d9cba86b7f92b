"""The command `toma`. One command a file; heavy imports wait until a command runs."""

import typer

from toma_lab.cli.bench import bench
from toma_lab.cli.demo import demo
from toma_lab.cli.env import env
from toma_lab.cli.eval import evaluate_command
from toma_lab.cli.explain import explain
from toma_lab.cli.generate import generate
from toma_lab.cli.learn import learn_command
from toma_lab.cli.playground import playground
from toma_lab.cli.report import report
from toma_lab.cli.tune import tune_command

app = typer.Typer(
    name="toma",
    help="Faster diffusion models without training: skipped steps that are predicted, and token merging (ToMA).",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)
app.command()(demo)
app.command()(generate)
app.command()(report)
app.command()(explain)
app.command()(bench)
app.command(name="eval")(evaluate_command)
app.command(name="learn")(learn_command)
app.command(name="tune")(tune_command)
app.command()(playground)
app.command()(env)
