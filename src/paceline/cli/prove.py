"""`paceline prove`: the text of speculation, or of another backend, is that of plain decoding."""

import json
from typing import Any

import click

from paceline.cli.console import engine_factory
from paceline.cli.flags import asked_arguments, data_flags, engine_flags, log_flags, log_to_stderr
from paceline.cli.interrupts import end_of_run
from paceline.cli.verb import Verb
from paceline.proof.lossless.prompt_set import PROMPTS


@click.command(
    cls=Verb,
    epilog="""\b
Examples:
  paceline prove                                       the bundled model and its drafter
  paceline prove --speculative-algorithm NGRAM --speculative-eagle-topk 2
  paceline prove Qwen/Qwen3-8B --against flashinfer    a backend against the one chosen

\b
Exit code: 0 when all texts are equal, ties apart; 1 when one is not, or when a drafter is accepted
far less often than it is known for; 2 for flags that cannot work.""",
)
@click.option("--against", metavar="BACKEND", help="Also compare this attention backend.")
@data_flags((PROMPTS,))
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Longest answer.  [tokens]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0, min_open=True),
    default=0.8,
    show_default=True,
    help="Of the seeded answers; the others are greedy.",
)
@click.option(
    "--top-p", type=float, default=0.95, show_default=True, help="Nucleus mass of the same."
)
@click.option("--json", "as_json", is_flag=True, help="Print the JSON document only.")
@log_flags
@engine_flags
@click.pass_context
def prove(ctx: click.Context, /, **values: Any) -> None:
    """Compare texts with and without speculation, or of two attention backends.

    Every prompt is answered greedily and with a seed.  Where two texts part, the plain engine's
    scores say whether rounding decided (a tie) or whether it is a bug; of a bug the first layer at
    fault is searched.  --seed seeds the answers.
    """
    from paceline.plan.speculation import without_speculation
    from paceline.proof.lossless.contest import contenders_of
    from paceline.proof.lossless.prompt_set import read_prompts
    from paceline.proof.lossless.prove import Trial
    from paceline.proof.lossless.prove import prove as compare
    from paceline.proof.lossless.report import document, table

    log_to_stderr(values)
    asked = asked_arguments(values)
    trial = Trial(
        prompts=read_prompts(values["prompts"]),
        max_tokens=values["max_tokens"],
        temperature=values["temperature"],
        top_p=values["top_p"],
        seed=int(values["seed"] or 0),
    )
    proof = compare(
        without_speculation(asked),
        contenders_of(asked, values["against"]),
        trial,
        make_llm=engine_factory(ctx),
    )
    if not values["as_json"]:
        click.echo(table(proof))
    click.echo(json.dumps(document(proof)))
    end_of_run(ctx, is_cut=proof.is_cut, code=proof.exit_code)
