"""The server that a bench starts: when it is there, and when it has gone."""

import sys

import pytest

from children import hearing_ctrl_c
from paceline.bench.serve import own_server
from paceline.core.errors import ModelError

SERVES = "print('loading', 'serving {name} on {url}, Ctrl-C stops', sep='\\n', file=sys.stderr)"
STAYS = "; time.sleep(600)"


def stand_in(monkeypatch, tmp_path, said):
    """What is run in place of `python -u -m paceline ...`."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{said}\n")
    path.chmod(0o755)
    monkeypatch.setattr(own_server.sys, "executable", str(path))


@pytest.mark.parametrize("name", ["tiny", "my model", "a on http://x/v1, b"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "https://[::1]:8000/v1"])
def test_it_is_there_when_it_says_so(monkeypatch, tmp_path, name, url):
    stand_in(monkeypatch, tmp_path, SERVES.format(name=name, url=url) + STAYS)
    with hearing_ctrl_c(), own_server.own_server([]) as found:
        assert found == url


def test_one_that_does_not_start_is_told_with_its_words(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, "sys.exit('no such model')")
    told = "paceline serve mine must be a server that starts, got exit code 1: no such model; "
    with pytest.raises(ModelError, match=told), own_server.own_server(["mine"]):
        pass


@pytest.mark.parametrize("fault", [None, ConnectionError])
def test_one_that_ends_meanwhile_is_told_whatever_the_bench_says(monkeypatch, tmp_path, fault):
    said = SERVES.format(name="tiny", url="http://127.0.0.1:1/v1")
    stand_in(monkeypatch, tmp_path, f"{said}; sys.stdin.read(); sys.exit('out of memory')")
    popen, started = own_server.subprocess.Popen, []

    def noted(*words, **how):
        started.append(popen(*words, stdin=own_server.subprocess.PIPE, **how))
        return started[0]

    monkeypatch.setattr(own_server.subprocess, "Popen", noted)
    told = "must be a server that stays, got exit code 1: loading / out of memory; "

    def bench():
        with own_server.own_server([]):
            started[0].stdin.close()
            started[0].wait()
            if fault is not None:
                raise fault

    with pytest.raises(ModelError, match=told):
        bench()
