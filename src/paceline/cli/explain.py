"""`paceline explain`: what the engine would do with a model on a device, and why."""

import json
from typing import Any

import click

from paceline.cli.flags import asked_arguments, engine_flags
from paceline.cli.verb import Verb, examples


@click.command(
    cls=Verb,
    epilog=examples(
        "paceline explain",
        "paceline explain llama-3.1-8b --gpu h200",
        "paceline explain llama-3.1-8b --gpu rtx-4090 --max-model-len 32k --kv-cache-dtype fp8",
        "paceline explain gemma-3-1b --gpu l4 --json",
    ),
)
@click.option("--gpu", default=None, help="Plan for a GPU by name, e.g. h200; else this machine.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@engine_flags
def explain(gpu: str | None, as_json: bool, **values: Any) -> None:
    """Plan a model on a device: memory, context, concurrency, attention backends.

    Needs neither the weights nor the device.  Exits with 2 when the model cannot fit.
    """
    from paceline.plan.explain import explain_model, show

    plan = explain_model(asked_arguments(values), gpu=gpu)
    click.echo(json.dumps(plan.to_json()) if as_json else show(plan))
    plan.require()
