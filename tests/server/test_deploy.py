"""docs/deploy.md and the Dockerfile, line by line as far as they can be tried without a cluster."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from serving import serving, small_llm

from paceline.cli.bench import bench
from paceline.cli.serve import serve
from paceline.server import run
from paceline.server.limits import LIMITS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PORT = "8000"


def fenced(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def instructions():
    """[(instruction, rest)] of the Dockerfile, lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in whole.splitlines() if line.strip()]


def of(name):
    return [rest for instruction, rest in instructions() if instruction == name]


def parsed(words):
    """Words of `paceline serve`, as the command reads them."""
    with serve.make_context("serve", list(words)) as ctx:
        return ctx.params


(UNIT,) = fenced("ini")
DEPLOYMENT, SCRAPE = map(yaml.safe_load, fenced("yaml"))
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_every_variant_of_the_image_is_a_stage_on_one_base():
    assert of("ARG") == ["VARIANT=cpu"]
    bases = [rest.partition(" AS ") for rest in of("FROM")]
    stages = {name: base for base, _, name in bases}
    assert stages == {
        "base": "python:3.12-slim-bookworm",
        "cpu": "base",
        "cuda": "base",
        "": "${VARIANT}",
    }
    known = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE"}
    known |= {"STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {instruction for instruction, _ in instructions()} <= known
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = set(re.findall(r"EXTRAS=\[(\w+)\]", DOCKERFILE))
    assert wanted <= extras["optional-dependencies"].keys()
    python = re.search(r"python:(\d+\.\d+)", DOCKERFILE)[1]
    assert any(line.endswith(f" {python}") for line in extras["classifiers"])


def test_the_image_is_made_of_files_that_are_here_and_sent_to_the_builder():
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    for rest in of("COPY"):
        *sources, _ = rest.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in sent, source
    assert sent[0] == "*"


def test_what_the_image_installs_is_what_the_project_asks_for():
    (install,) = [rest for rest in of("RUN") if "constraints.txt" in rest]
    words = shlex.split(install)
    assert words[:3] == ["uv", "pip", "install"]
    assert words[-1] == ".$EXTRAS"
    assert {"cpu", "cu130"} == set(re.findall(r"TORCH_BACKEND=(\w+)", DOCKERFILE))


def test_the_image_starts_a_server_that_its_probe_reaches():
    (entry,), (command,) = of("ENTRYPOINT"), of("CMD")
    program, verb, *words = json.loads(entry)
    assert (program, verb) == ("paceline", "serve")
    found = parsed([*words, *json.loads(command)])
    assert (found["host"], str(found["port"]), found["model_argument"]) == (
        "0.0.0.0",
        PORT,
        "bundled",
    )
    assert of("EXPOSE") == [PORT]
    assert of("STOPSIGNAL") == ["SIGTERM"]


def test_the_health_check_of_the_image_runs_as_it_stands():
    (check,) = of("HEALTHCHECK")
    program, flag, code = json.loads(check.partition("CMD ")[2])
    assert (program, flag) == ("python", "-c")
    with serving(small_llm(speculative_algorithm="off"), api_keys=["sesame"]) as server:
        live = code.replace(f"http://127.0.0.1:{PORT}", server.url)
        assert subprocess.run([sys.executable, flag, live], check=False).returncode == 0
        gone = live.replace("/health", "/nowhere")
        done = subprocess.run([sys.executable, flag, gone], check=False, capture_output=True)
        assert done.returncode == 1


def test_commands_of_the_page_have_flags_that_exist(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # a file that one names is opened
    lines = [line for block in fenced("sh") for line in block.splitlines() if line]
    for line in lines:
        words = shlex.split(line)
        if words[0] == "docker":
            build_args = [word for word in words if word.startswith("VARIANT=")]
            assert all(word.partition("=")[2] in ("cpu", "cuda") for word in build_args)
            if "run" in words:
                at = (
                    next(i for i, word in enumerate(words) if word.startswith("paceline:cuda"))
                    if "--gpus" in words
                    else words.index("paceline")
                )
                assert parsed(words[at + 1 :])["model_argument"]
        elif words[0] == "paceline":
            verb = bench.commands[words[2]]
            with verb.make_context(words[2], words[3:]) as ctx:
                assert ctx.params["base_url"].endswith("/v1")
        else:
            assert words[0] == "curl", line


def test_the_unit_runs_a_command_that_is_read_whole_and_is_given_time_to_stop():
    settings = dict(line.split("=", 1) for line in UNIT.splitlines() if "=" in line)
    program, verb, *words = shlex.split(settings["ExecStart"])
    assert Path(program).name == "paceline"
    assert verb == "serve"
    drain = parsed(words)["drain_seconds"]
    assert int(settings["TimeoutStopSec"]) > drain + run._FAREWELL_S + run._GRACE_S
    assert int(settings["LimitNOFILE"]) > LIMITS.max_connections


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_reads_the_unit(tmp_path):
    def verified(text):
        path = tmp_path / "paceline.service"
        path.write_text(text.replace("/opt/paceline/bin/paceline", "/bin/true"))
        words = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    done = verified(UNIT)
    assert done.returncode == 0, done.stderr
    assert "paceline.service" not in done.stderr, done.stderr
    broken = verified(UNIT.replace("KillMode=mixed", "KillMode=sometimes"))
    assert "paceline.service" in broken.stderr


def test_the_pod_is_given_time_to_stop_and_its_arguments_are_read():
    found = parsed(CONTAINER["args"])
    least = found["drain_seconds"] + run._FAREWELL_S + run._GRACE_S
    assert POD["terminationGracePeriodSeconds"] > least
    assert [port["containerPort"] for port in CONTAINER["ports"]] == [int(PORT)]
    (key,) = CONTAINER["env"]
    (option,) = [each for each in serve.params if each.name == "api_keys"]
    assert key["name"] == option.envvar
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels
    names = {volume["name"] for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == names
    (volume,) = of("VOLUME")
    assert [mount["mountPath"] for mount in CONTAINER["volumeMounts"]] == [volume]


def test_probes_and_metrics_answer_as_the_page_says():
    with serving(small_llm(speculative_algorithm="off"), api_keys=["sesame"]) as server:
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = CONTAINER[name]["httpGet"]
            assert str(probe["port"]) == PORT
            assert httpx.get(server.url + probe["path"]).status_code == 200
        (job,) = SCRAPE["scrape_configs"]
        where = server.url + job["metrics_path"]
        assert httpx.get(where).status_code == 401
        page = httpx.get(where, headers={"Authorization": "Bearer sesame"}).text
        families = list(text_string_to_metric_families(page))
        shown = {family.name for family in families}
        shown |= {sample.name for family in families for sample in family.samples}
        named = set(re.findall(r"`(paceline_\w+)`", PAGE))
        assert len(named) > 10
        assert named <= shown


def test_limits_of_the_page_are_those_of_the_command():
    rows = re.findall(r"^\| `(--[\w-]+)` \| (\d+) \|", PAGE, re.MULTILINE)
    defaults = {flag: param.default for param in serve.params for flag in param.opts}
    assert len(rows) == 11
    for flag, value in rows:
        assert defaults[flag] == float(value), flag
    assert f"`--drain-seconds` ({LIMITS.drain_s:g})" in PAGE
    assert f"clients have {run._FAREWELL_S:g} s" in PAGE
    assert f"After {run._GRACE_S:g} s more" in PAGE
    assert f"| {run.STUCK} |" in PAGE
    assert "api_key" in {param.name.rstrip("s") for param in serve.params}
