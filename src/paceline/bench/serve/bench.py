"""`paceline bench serve`: a server under load."""

from collections.abc import Sequence

from paceline.bench.serve.load import LoadRun
from paceline.bench.serve.own_server import own_server
from paceline.bench.serve.report import ServeReport
from paceline.bench.serve.shape import LoadShape
from paceline.bench.traffic.shape import refused


def bench_serve(
    shape: LoadShape,
    *,
    base_url: str | None,
    model: str | None,
    api_key: str | None,
    words: Sequence[str] = (),
) -> ServeReport:
    """Run the benchmark, on a server that is there or, without base_url, on one started with
    `words`.  Raises ConfigError, ModelError, IntegrityError.
    """
    if base_url is not None:
        if words:
            remedy = "drop --base-url to start one, or what stands behind --"
            raise refused("the server", "one", f"--base-url and {' '.join(words)}", remedy)
        load = LoadRun(shape).run(base_url, model=model, api_key=api_key)
        return ServeReport(shape=shape, load=load, started=None)
    with own_server(words) as url:
        load = LoadRun(shape).run(url, model=model, api_key=api_key)
    return ServeReport(shape=shape, load=load, started=tuple(words))
