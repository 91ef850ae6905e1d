"""`paceline check`: the conformance matrix on this machine."""

from collections.abc import Callable
from typing import Any

import click

from paceline.cli.verb import Verb
from paceline.proof.check.flags import EPILOG, FLAGS, SUMMARY


def check_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags of the check."""
    for flag in reversed(FLAGS):
        if flag.kind is bool:
            add = click.option(flag.flag, is_flag=True, help=flag.help)
        else:
            add = click.option(
                flag.flag,
                type=flag.kind if flag.choices is None else click.Choice(flag.choices),
                default=flag.default,
                show_default=flag.default is not None,
                metavar=flag.metavar,
                multiple=flag.is_repeated,
                help=flag.help,
            )
        command = add(command)
    return command


@click.command(cls=Verb, help=SUMMARY, epilog="\b\n" + EPILOG.replace("\n\n", "\n\n\b\n"))
@check_flags
@click.pass_context
def check(ctx: click.Context, /, **values: Any) -> None:
    """Run the cells that the flags select."""
    from paceline.proof.check.run import run_check

    ctx.exit(run_check(values, **(ctx.obj or {})))
