"""`paceline debug`: what helps to see a bug."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from paceline.cli.flags import asked_arguments, engine_flags, log_flags, log_to_stderr
from paceline.cli.verb import Verb, Verbs, examples

REPRODUCED, OTHERWISE = 0, 1  # exit codes


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


@debug.command(
    cls=Verb,
    epilog=examples(
        "paceline serve --black-box-dir boxes                        writes one where a turn fails",
        "paceline debug replay boxes/paceline-20260101T120000.000000000-7.box.json",
        "paceline debug replay FILE --enforce-eager                  is it the graphs?",
        "paceline debug replay FILE --attention-backend torch        is it the backend?",
        "paceline debug replay FILE --device cpu --dtype float32     is it the device?",
        "paceline debug replay FILE --sanitize                       is it a wrong read?",
    ),
)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--stuck-seconds",
    type=click.FloatRange(min=1.0),
    default=60.0,
    show_default=True,
    help="A step that takes longer hangs.  [s]",
)
@log_flags
@engine_flags
@click.pass_context
def replay(ctx: click.Context, /, file: Path, stuck_seconds: float, **values: Any) -> None:
    """Run the last steps of an engine that failed again, from its black box FILE.

    With --black-box-dir an engine keeps its last 256 steps, and writes them to a file when a turn
    raises, when logits are not finite, or when the server's watchdog sees that it hangs.  The file
    has options, versions, requests with their token ids and extra_args, every step (rows, lengths,
    pages, masks, and what was sampled), and what was raised.  It has no weights, and is no pickle.

    The same engine is built here, with other options where you give them, and given the same steps.
    What the cache held before the first is computed again from the tokens.  Told are the first
    token that is another, and whether the failure comes in the same step.

    Exit code 0: it is reproduced, 1: it is not, 2: the steps cannot be run here.  So git bisect run
    finds since when it comes, with a ! before the command.
    """
    log_to_stderr(values)
    asked = asked_arguments(values)
    from paceline.llm.box.record import STUCK, read_record
    from paceline.llm.box.replay import replay as play

    record = read_record(file)
    failure = record.failure
    click.echo(f"recorded    {record.written}: {failure.kind} in step {len(record.steps)}")
    click.echo(f"            {failure.text}")
    for frame in failure.trace if values["verbose"] else ():
        click.echo(f"            {frame}")
    with _hanging(stuck_seconds, is_wanted=failure.kind == STUCK) as moves:
        found = play(record, asked, at_step=moves.set)
    click.echo(
        f"replayed    {found.num_steps} steps, {found.num_compared} tokens compared, "
        f"{found.num_restored} tokens of the cache computed before"
    )
    click.echo(f"difference  {found.difference or 'none'}")
    click.echo(f"{'reproduced' if found.is_reproduced else 'not so':<11} {found.end}")
    ctx.exit(REPRODUCED if found.is_reproduced else OTHERWISE)


@contextmanager
def _hanging(limit_s: float, *, is_wanted: bool) -> Iterator[threading.Event]:
    """Within the block, from the first time that the event is set on, leave the process when it is
    not set for so long: nothing else ends a step that hangs.  is_wanted: that was recorded."""
    moves, is_over = threading.Event(), threading.Event()

    def watch() -> None:
        moves.wait()
        while not is_over.is_set():
            moves.clear()
            if not moves.wait(limit_s) and not is_over.is_set():
                verdict = "reproduced" if is_wanted else "not so"
                click.echo(f"{verdict:<11} the step did not end within {limit_s:g} s")
                sys.stdout.flush()
                os._exit(REPRODUCED if is_wanted else OTHERWISE)

    threading.Thread(target=watch, name="paceline-hang", daemon=True).start()
    try:
        yield moves
    finally:
        is_over.set()
        moves.set()
