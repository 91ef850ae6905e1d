"""`paceline env`: this machine, and which attention backends are live on it."""

import json

import click

from paceline.cli.verb import Verb, examples


@click.command(cls=Verb, epilog=examples("paceline env", "paceline env --json"))
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def env(as_json: bool) -> None:
    """Show this machine: versions, CPU, memory, GPUs, backends, kernel cache."""
    from paceline.plan.environment import environment

    found = environment()
    click.echo(json.dumps(found.to_json()) if as_json else found.table())
