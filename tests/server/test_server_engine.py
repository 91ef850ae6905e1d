"""A server whose engine has failed."""

import httpx
from serving import serving, small_llm, wait_until


def test_a_failed_engine_answers_500_to_all_and_503_to_health(caplog):
    llm = small_llm(speculative_algorithm="off")
    turn, is_broken = llm.engine._turn, []

    def break_later(*values):
        if is_broken:
            raise RuntimeError("the device is gone")
        return turn(*values)

    llm.engine._turn = break_later
    body = {"model": "tiny", "prompt": "x", "max_tokens": 250, "ignore_eos": True}
    with serving(llm) as server, httpx.Client(base_url=server.url, timeout=None) as client:
        assert client.get("/health").status_code == 200
        with client.stream("POST", "/v1/completions", json=dict(body, stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            is_broken.append(True)
            last = [line for line in lines if line][-1]
        assert "ended by RuntimeError('the device is gone')" in last
        assert '"type":"server_error"' in last
        wait_until(lambda: server.engine.callers.failure is not None)
        for stream in (False, True):
            answer = client.post("/v1/completions", json=dict(body, stream=stream))
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
            assert "the engine must be running, got ended by" in answer.json()["error"]["message"]
        for path in ("/health", "/ready"):
            probe = client.get(path)
            assert probe.status_code == 503
            assert "the device is gone" in probe.json()["error"]["message"]
    (record,) = [each for each in caplog.records if each.name == "paceline" and each.exc_info]
    assert "the engine has failed" in record.message
