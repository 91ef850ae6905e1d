"""A rank behind the leader: a process that runs the leader's steps over its part of a model.

It ends with its leader: when that closes the bell, or is gone.  Stdout is the way back, where it
tells how far it is (`llm.ranks`); what others print goes to stderr.
"""

import os
import select
import sys
from contextlib import suppress
from threading import Thread
from typing import IO

import msgspec

from paceline.core.errors import PacelineError
from paceline.llm.boot import Knobs, decide_parts, load_runner, planned_pages
from paceline.llm.prepare import prepare
from paceline.llm.rank_phases import Phase
from paceline.llm.rank_setup import RankSetup, planned, started
from paceline.llm.rank_words import (
    Agreed,
    Loaded,
    RankFailed,
    RankReady,
    is_compared,
    said,
    tell,
)
from paceline.runner.shared_memory import FrameReader
from paceline.runner.step_frames import decode_step

_BELL = 0  # stdin


def run(setup: RankSetup, file: IO[bytes]) -> None:
    """Boot and run steps until the leader goes.  file: to the leader."""
    tell(file, started())
    memory = setup.map()
    memory.phases[setup.rank] = Phase.PLANS
    setup.take_gpu()
    prepared = prepare(setup.options, rank=setup.rank)
    num_pages = planned_pages(prepared, Knobs())
    peers = setup.peer_memory()
    tell(file, planned(prepared, num_pages, peers))
    reader = FrameReader(memory, setup.rank, _BELL)
    agreed = msgspec.msgpack.decode(reader.read(), type=Agreed)
    knobs = Knobs(
        capture=agreed.capture,
        poison_graphs=agreed.poison_graphs,
        staging_depth=agreed.staging_depth,
        num_pages=agreed.num_pages,
    )
    memory.phases[setup.rank] = Phase.LOADS
    decided = decide_parts(prepared, knobs)

    def meet() -> None:
        memory.phases[setup.rank] = Phase.CAPTURES
        tell(file, Loaded())
        reader.read()

    exchange = memory.exchange(setup.rank) if peers is None else peers.open(agreed.boxes)
    runner = load_runner(prepared, decided, knobs, exchange, meet)
    memory.phases[setup.rank] = Phase.RUNS
    tell(file, RankReady())
    every = prepared.options.compare_ranks_every
    while True:
        launched = runner.launch(decode_step(reader.read()))
        if is_compared(launched.step, every):
            tell(file, said(launched.wait()))


def _end_with_leader() -> None:
    """A thread's life: whatever the others do, nothing of them is left behind the leader."""
    poll = select.poll()
    poll.register(_BELL, 0)  # POLLHUP alone
    poll.poll()
    os._exit(0)


def main() -> None:
    """Exit code 1 for an error, which the leader is told; one that nobody raised on purpose goes to
    stderr with where it happened."""
    Thread(target=_end_with_leader, daemon=True).start()
    file = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    setup = msgspec.json.decode(sys.argv[1], type=RankSetup)
    sys.path[:] = setup.path
    try:
        with suppress(EOFError):
            run(setup, file)
    except PacelineError as error:
        tell(file, RankFailed(text=str(error)))
        sys.exit(1)
    except Exception as error:
        tell(file, RankFailed(text=repr(error)))
        raise


if __name__ == "__main__":
    main()
