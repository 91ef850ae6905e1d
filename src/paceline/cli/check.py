"""`paceline check`: the conformance matrix on this machine."""

from typing import Any

import click

from paceline.cli.flags import data_flags
from paceline.cli.verb import Verb
from paceline.proof.check.flags import EPILOG, FLAGS, SUMMARY


@click.command(cls=Verb, help=SUMMARY, epilog="\b\n" + EPILOG.replace("\n\n", "\n\n\b\n"))
@data_flags(FLAGS)
@click.pass_context
def check(ctx: click.Context, /, **values: Any) -> None:
    """Run the cells that the flags select."""
    from paceline.proof.check.run import run_check

    ctx.exit(run_check(values, **(ctx.obj or {})))
