"""`paceline debug`: what helps to see a bug."""

import json

import click

from paceline.cli.verb import Verbs


@click.group(cls=Verbs)
def debug() -> None:
    """See a bug, and see that a test catches it."""


@debug.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def fixes(as_json: bool) -> None:
    """List past bugs that can be switched back on.

    PACELINE_REVERT_FIX=ID[,ID...] edits the engine's source as it is imported, so that the bug is
    back; the case of the list then fails.  An id that does not exist, or an edit that no longer
    fits the source, is an error.

    \b
    paceline debug fixes
    paceline check --filter CASE                            passes
    PACELINE_REVERT_FIX=ID paceline check --filter CASE     fails
    PACELINE_REVERT_FIX=ID pytest CASE                      a case tests/...::...
    """
    from paceline.proof.fixes.registry import all_fixes, show, to_json

    listed = all_fixes()
    if as_json:
        click.echo(json.dumps({"fixes": [to_json(fix) for fix in listed]}))
    else:
        click.echo(show(listed))
