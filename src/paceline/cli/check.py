"""`paceline check`: the conformance matrix on this machine."""

from typing import Any

import click

from paceline.cli.flags import data_flags
from paceline.cli.verb import Verb
from paceline.proof.check.flags import FLAGS


@click.command(
    cls=Verb,
    epilog="""\b
A cell is method/backend/mode/runner/variant, for example
dense/triton/target_verify/cuda_graph/topk4.  Examples:

\b
  paceline check                                     the quick matrix of this machine
  paceline check --full --json check.json --html check.html
  paceline check --backend triton --backend fa4      these backends
  paceline check --backend my_package.mod:MyBackend  a backend of your own
  paceline check --filter "verify and not triton"    words: part of the cell, or a glob of all of it
  paceline check --filter "dense/*/decode/* and (page1 or page64)"
  paceline check --full --against old.json           is every bit as it was before a change?

\b
Exit code: 0 when no cell fails, 1 when one does, differs or takes too long, 2 for flags that cannot
work.""",
)
@data_flags(FLAGS)
@click.pass_context
def check(ctx: click.Context, /, **values: Any) -> None:
    """Prove attention backends, cell by cell, against an independent float64 oracle."""
    from paceline.proof.check.run import run_check

    ctx.exit(run_check(values, **(ctx.obj or {})))
