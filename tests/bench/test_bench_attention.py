"""The attention benchmark: it checks before it times, and its numbers follow from the shape."""

import importlib.machinery
import json
import sys
from dataclasses import replace
from pathlib import Path

import fake_flashinfer
import jsonschema
import pytest
import torch
from click.testing import CliRunner

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.measurements import parse_table
from paceline.bench import attention_workload, flashinfer_peer, interleaved
from paceline.bench.attention import bench_attention, choose_peer
from paceline.bench.attention_contenders import our_make, ragged_lens, require_memory, worst_errors
from paceline.bench.attention_shape import FLAGS, AttentionShape, suite
from paceline.bench.attention_workload import make_workload
from paceline.bench.backends import bench_backends, plan_of
from paceline.cli.app import app
from paceline.core.errors import BackendUnsupported, ConfigError, IntegrityError
from paceline.core.gpus import GPUS, published_row
from paceline.core.model.config import Heads
from paceline.plan.machine import cpu_facts

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "bench_attention.json"
CPU = torch.device("cpu")
SMALL = {"batch_size": 4, "kv_len": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def small(**changes):
    return AttentionShape(**{**SMALL, "dtype": "float32", "page_size": 4, **changes})


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    monkeypatch.setattr(interleaved, "ROUNDS", 3)
    monkeypatch.setattr("paceline.bench.attention_contenders.CPU_SPAN_BYTES", 1)


@pytest.fixture
def flashinfer(monkeypatch):
    """FlashInfer, as far as anything here can tell."""
    spec = importlib.machinery.ModuleSpec("flashinfer", None)
    monkeypatch.setattr(fake_flashinfer, "__spec__", spec)
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)


@pytest.mark.parametrize("extend_len", [1, 5])
def test_the_document_fits_its_schema(extend_len):
    document = bench_attention(small(extend_len=extend_len)).to_json()
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert [row["name"] for row in document["results"]] == ["torch"]
    assert document["ratio"] is None
    assert document["versions"]["torch"] == torch.__version__


def test_the_command_ends_with_the_document():
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    words += ["--dtype", "float32", "--page-size", "4"]
    done = CliRunner().invoke(app, ["bench", "attention", *words])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("decode: 4 x 40 keys, 4/2 heads of 8, page 4, float32")
    jsonschema.validate(json.loads(lines[-1]), json.loads(SCHEMA.read_text()))


def broken(change):
    """A backend whose step sees something else than it was given."""

    def make(workload):
        change(workload)
        return our_make("torch")(workload)

    return make


def reads_one_key_too_many(workload):
    workload.view.kv_lens[:3] += 1  # the last one fills its page table
    workload.view.prefix_lens[:3] += 1


def reads_one_key_too_few(workload):
    workload.view.kv_lens.sub_(1)
    workload.view.prefix_lens.sub_(1)


def confuses_two_pages(workload):
    table = workload.view.groups[0].page_table
    table[2, :2] = table[2, :2].flip(0).clone()
    table[1, 0] = table[2, 0]


@pytest.mark.parametrize("extend_len", [1, 5])
@pytest.mark.parametrize("fault", [reads_one_key_too_many, reads_one_key_too_few])
def test_a_wrong_length_is_not_timed(fault, extend_len):
    shape = small(extend_len=extend_len)
    work = make_workload(shape, ragged_lens(shape), layers=1, device=CPU, seed=0)
    expected = [work.worst_error(our_make("torch")(work)(0), range(4))]
    wrong = make_workload(shape, ragged_lens(shape), layers=1, device=CPU, seed=0)
    out = broken(fault)(wrong)(0)
    assert expected[0] <= 1.0
    assert work.worst_error(out, range(4)) > 1e3


def test_a_page_of_another_request_is_not_timed():
    shape = small()
    work = make_workload(shape, ragged_lens(shape), layers=1, device=CPU, seed=0)
    wrong = make_workload(shape, ragged_lens(shape), layers=1, device=CPU, seed=0)
    assert work.worst_error(broken(confuses_two_pages)(wrong)(0), range(4)) > 1e3


def test_a_wrong_answer_is_refused_by_name():
    def make(workload):
        return lambda layer: torch.zeros_like(workload.q)

    with pytest.raises(
        IntegrityError, match="attention of broken must be the definition's, within"
    ):
        worst_errors({"torch": our_make("torch"), "broken": make}, small(), CPU)


def test_the_memory_of_a_workload_is_poisoned_where_nobody_may_read():
    shape = small()
    work = make_workload(shape, [5, 37, 1], layers=2, device=CPU, seed=0)
    for layer in work.layers:
        live = (~layer.k_cache.isnan()).all(dim=(2, 3)).sum()
        assert live == 5 + 37 + 1
        assert layer.k_cache[0].isnan().all()
    assert not torch.equal(work.layers[0].v_cache, work.layers[1].v_cache)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("extend_len", [1, 5])
def test_flashinfer_is_driven_as_it_is_documented(flashinfer, extend_len, kv_dtype):
    shape = small(extend_len=extend_len, kv_dtype=kv_dtype)
    makes = flashinfer_peer.variants(shape)
    errors = worst_errors(makes, shape, CPU)
    names = {"flashinfer tensor cores", "flashinfer"} if extend_len == 1 else {"flashinfer"}
    assert set(errors) == names


def test_a_peer_is_compared_by_its_better_kernel(flashinfer, monkeypatch):
    monkeypatch.setattr(flashinfer_peer, "absence", lambda shape, device_type: None)
    document = bench_attention(small(), peer="flashinfer").to_json()
    ours, *peers = [row["us"] for row in document["results"]]
    assert len(peers) == 2
    assert document["ratio"] == pytest.approx(min(peers) / ours)
    assert document["versions"]["flashinfer"] == "0.6.12+fake"
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))


def test_an_absent_peer_is_told_by_auto_and_refused_by_name():
    assert choose_peer("auto", small(), "cuda").why == (
        "no flashinfer: the package flashinfer is not installed"
    )
    with pytest.raises(ConfigError) as caught:
        choose_peer("flashinfer", small(), "cuda")
    assert str(caught.value) == (
        "peer must be a library that runs here, got flashinfer (the package flashinfer is not "
        "installed); use --peer none, or a machine and a shape that FlashInfer serves"
    )
    assert choose_peer("none", small(), "cuda").why == "not asked for"


def test_flashinfer_is_not_asked_for_shapes_it_lacks(flashinfer):
    reason = flashinfer_peer.absence(small(), "cuda")
    assert reason == "it has 16-bit queries of head dims 64, 128, 256, not float32 of 8"
    assert flashinfer_peer.absence(AttentionShape(), "cpu") == "it needs a CUDA device, not cpu"
    assert flashinfer_peer.absence(AttentionShape(), "cuda") is None
    assert list(flashinfer_peer.variants(AttentionShape(num_heads=28, num_kv_heads=4))) == [
        "flashinfer tensor cores"
    ]


def test_contenders_take_turns():
    calls = []

    def run(name):
        return lambda layer: calls.append((name, layer))

    interleaved.time_interleaved({"a": run("a"), "b": run("b")}, layers=2, device=CPU)
    rounds = "".join(name for name, layer in calls if layer == 0)
    assert rounds == "ab" + "ab" + "ba" + "ab"


def test_bytes_and_products_are_those_of_the_visible_pairs():
    decode = AttentionShape()
    assert decode.moved_bytes == 64 * 4096 * 2 * 8 * 128 * 2
    assert AttentionShape(kv_dtype="fp8").moved_bytes == decode.moved_bytes / 2
    assert AttentionShape(dtype="float32").moved_bytes == decode.moved_bytes * 2
    extend = small(extend_len=5)
    pairs = sum(key <= 35 + query for query in range(5) for key in range(40))
    assert extend.flops == 4 * 4 * 8 * 4 * pairs


@pytest.mark.parametrize("extend_len", [1, 5, 21])
def test_a_token_sees_its_own_chunk_alone(extend_len):
    shape = small(kv_len=38, extend_len=extend_len, chunk=16)
    positions = range(38 - extend_len, 38)
    pairs = sum(
        key // 16 == position // 16 for position in positions for key in range(position + 1)
    )
    assert shape.flops == 4 * 4 * 8 * 4 * pairs
    assert shape.moved_bytes == 4 * (38 - positions[0] // 16 * 16) * shape.kv_token_bytes
    report = bench_attention(shape, backend="torch", peer="none", device=cpu_facts())
    assert report.results[0].error < 8.0
    jsonschema.validate(report.to_json(), json.loads(SCHEMA.read_text()))


def test_the_suite_of_chunks_has_loads_within_one_and_across():
    loads = {(each.kv_len, each.extend_len) for each in suite(small(chunk=8192))}
    decodes, prefills = {(4096, 1), (12288, 1)}, {(1024, 1024), (12288, 8192)}
    assert loads == decodes | prefills


def test_the_limit_is_the_slower_of_memory_and_products():
    h200 = GPUS["h200"]
    peaks = (h200.bandwidth_bytes_s, h200.matmul_flops)
    decode = AttentionShape()
    assert decode.limit_s(*peaks) == decode.moved_bytes / 4.8e12
    prefill = AttentionShape(batch_size=8, kv_len=1024, extend_len=1024)
    assert prefill.limit_s(*peaks) == prefill.flops / 989.4e12
    assert decode.limit_s(None, None) is None


@pytest.mark.parametrize(
    ("driver", "row"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-PCIE-80GB", None),
    ],
)
def test_a_board_is_found_by_the_name_its_driver_gives(driver, row):
    assert published_row(driver) == (None if row is None else GPUS[row])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0; change --batch-size"),
        ({"extend_len": 41}, "extend_len must be at most 40, the keys of a request, got 41"),
        ({"num_heads": 3}, "num_heads must be a multiple of 2, the KV heads, got 3"),
    ],
)
def test_senseless_shapes_are_refused(changes, text):
    with pytest.raises(ConfigError) as caught:
        small(**changes)
    assert str(caught.value).startswith(text)


def test_what_cannot_run_here_is_refused():
    with pytest.raises(BackendUnsupported, match="attention backend 'triton' cannot run here"):
        bench_attention(small(head_dim=40), backend="triton")
    with pytest.raises(ConfigError, match="lower --batch-size or --kv-len"):
        require_memory(AttentionShape(batch_size=10**6), 2, cpu_facts())


# --- our backends against each other --------------------------------------------------------------

BACKENDS_SCHEMA = SCHEMA.with_name("bench_attention_backends.json")


class Fails(TorchBackend):
    """Named from this file."""

    def make_buffers(self, limits):
        raise OSError("libnothing.so: cannot open")


class FailsToPlan(TorchBackend):
    """Plans a ragged step, of which answers are checked, but none of those that are timed."""

    def plan(self, view, buffers):
        if len(set(view.kv_lens.tolist())) == 1:
            raise RuntimeError("no such schedule")
        return super().plan(view, buffers)


class FailsToRun(FailsToPlan):
    """The same, but at the first layer."""

    def plan(self, view, buffers):
        return TorchBackend().plan(view, buffers), len(set(view.kv_lens.tolist())) == 1

    def forward(self, q, k, v, layer, plan, part):
        if plan[1]:
            raise RuntimeError("no such kernel")
        return super().forward(q, k, v, layer, plan[0], part)


class Wrong(TorchBackend):
    def forward(self, q, k, v, layer, plan, part):
        out, lse = super().forward(q, k, v, layer, plan, part)
        return out.roll(1, 0), lse


class Planned(TorchBackend):
    """Refuses to plan what was not planned on the host, from exact lengths and no device value."""

    capabilities = replace(TorchBackend.capabilities, host_plan=True, loads_dead_slots=True)

    def host_plan(self, step, buffers):
        assert isinstance(step.kv_lens_bound, tuple)
        self.kv_lens = list(step.kv_lens_bound)

    def plan(self, view, buffers):
        assert view.kv_lens.tolist() == self.kv_lens
        return super().plan(view, buffers)

    def forward(self, q, k, v, layer, plan, part):
        assert not layer.k_cache.isnan().any()
        return super().forward(q, k, v, layer, plan, part)


def asked(**changes):
    values = {flag.name: flag.default for flag in FLAGS} | SMALL
    return {**values, "dtype": "float32", "page_size": 4, "device": "cpu", **changes}


def compared(*backends, **changes):
    plan = plan_of(asked(backends=",".join(backends), **changes))
    report = bench_backends(plan, cpu_facts())
    document = json.loads(json.dumps(report.to_json()))
    jsonschema.validate(document, json.loads(BACKENDS_SCHEMA.read_text()))
    return report


@pytest.mark.parametrize(("extend_len", "phase"), [(1, "decode"), (5, "prefill")])
def test_backends_are_measured_beside_each_other(extend_len, phase):
    report = compared("torch", f"{__name__}:Planned", extend_len=extend_len)
    assert [row.backend for row in report.rows] == ["torch", f"{__name__}:Planned"]
    assert {row.phase for row in report.rows} == {phase}
    assert report.notes == ()


def test_a_backend_that_cannot_run_or_is_wrong_gets_a_note_and_no_row():
    names = [f"{__name__}:Fails", "fa4", "torch", f"{__name__}:Wrong"]
    report = compared(*names)
    assert [row.backend for row in report.rows] == ["torch"]
    fails, fa4, wrong = report.notes
    assert fails.reasons == ["OSError: libnothing.so: cannot open"]
    assert fa4.reasons[0] == "device must be cuda, got cpu"
    assert wrong.reasons[0].startswith("IntegrityError: attention of")
    assert f"not {__name__}:Fails for 4 x 40 keys, 1 new: OSError" in report.table()


@pytest.mark.parametrize(
    ("name", "reason"), [("FailsToPlan", "no such schedule"), ("FailsToRun", "no such kernel")]
)
@pytest.mark.parametrize("others", [[], ["torch"]], ids=["alone", "beside another"])
def test_a_backend_that_cannot_be_timed_costs_no_other_its_row(name, reason, others):
    report = compared(f"{__name__}:{name}", *others)
    assert [row.backend for row in report.rows] == others
    (note,) = report.notes
    assert (note.backend, note.reasons) == (f"{__name__}:{name}", [f"RuntimeError: {reason}"])


def test_a_suite_has_both_phases_of_the_layer_that_was_asked_for():
    plan = plan_of(asked(backends="torch", shapes="suite", head_dim=64))
    loads = {
        (shape.phase, shape.batch_size, shape.kv_len, shape.extend_len) for shape in plan.shapes
    }
    assert ("decode", 64, 4096, 1) in loads
    assert ("prefill", 1, 8192, 8192) in loads
    assert len(loads) == len(plan.shapes) == 9
    assert {shape.head_dim for shape in plan.shapes} == {64}


def test_rows_are_merged_into_a_table(tmp_path):
    path = tmp_path / "table.json"
    compared("torch", save=str(path))
    compared("torch", save=str(path), extend_len=5)
    compared("torch", save=str(path))
    found = parse_table(path.read_text(), source="x")
    assert sorted(row.phase for row in found) == ["decode", "prefill"]


def test_the_command_compares_backends(tmp_path):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    words += ["--dtype=float32", "--backends=torch", f"--save={tmp_path / 'table.json'}"]
    done = CliRunner().invoke(app, ["bench", "attention", *words])
    assert done.exit_code == 0, done.output
    assert f"merged into {tmp_path / 'table.json'}" in done.stdout
    document = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(document, json.loads(BACKENDS_SCHEMA.read_text()))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"save": "x.json"}, "--save must be left out without --backends, got x.json; drop it"),
        ({"shapes": "suite"}, "--shapes must be left out without --backends, got suite"),
        ({"backends": "torch", "backend": "torch"}, "--backend must be left out beside --backends"),
        ({"backends": "torch", "peer": "flashinfer"}, "--peer must be left out beside --backends"),
        ({"backends": "torch,nope"}, "attention backend must be triton, torch"),
        ({"backends": "auto"}, "attention backend must be triton, torch"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(changes, text):
    with pytest.raises(ConfigError) as caught:
        plan_of(asked(**changes))
    assert str(caught.value).startswith(text)


def test_a_table_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "no" / "t", "No such file")):
        with pytest.raises(ConfigError) as caught:
            plan_of(asked(backends="torch", save=str(path)))
        assert str(caught.value).startswith("--save must be a file that can be written, got")
        assert why in str(caught.value)
    (tmp_path / "a.json.new").mkdir()  # where the file is written before it is replaced
    with pytest.raises(ConfigError, match=r"--save must be .* got '.*a.json' .Is a directory"):
        plan_of(asked(backends="torch", save=str(tmp_path / "a.json")))
    assert not (tmp_path / "a.json").exists()
    other = tmp_path / "other.json"
    other.write_text('{"not": "a table"}')
    with pytest.raises(ConfigError, match=r"table of measurements in .* must be a JSON list"):
        plan_of(asked(backends="torch", save=str(other)))
    assert other.read_text() == '{"not": "a table"}'
    other.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"table of .* got text that is not UTF-8"):
        plan_of(asked(backends="torch", save=str(other)))
    plan_of(asked(backends="torch", save=str(tmp_path / "new.json")))
    assert not list(tmp_path.glob("new.json*"))


def test_the_definition_is_the_same_in_passes(monkeypatch):
    shape = small(extend_len=11)
    work = make_workload(shape, ragged_lens(shape), layers=1, device=CPU, seed=0)
    out = our_make("torch")(work)(0)
    whole = work.worst_error(out, range(4))
    monkeypatch.setattr(attention_workload, "REFERENCE_ROWS", 4)
    assert work.worst_error(out, range(4)) == pytest.approx(whole, abs=0.5)
    assert work.worst_error(out.roll(1, 0), range(4)) > 1e3


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_memory_may_be_poisoned_with_numbers(kv_dtype):
    shape = small(kv_dtype=kv_dtype)
    work = make_workload(shape, [5, 37, 1], layers=1, device=CPU, seed=0, finite=True)
    cache = work.layers[0].k_cache.float()
    assert cache.isfinite().all()
    assert (cache[0] == (448.0 if kv_dtype == "fp8" else 4096.0)).all()


LATENTS = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 24, "latent_rank": 16}


def test_latents_are_one_row_that_is_read_once():
    shape = small(**LATENTS, batch_size=2)
    assert shape.heads == Heads(4, 1, 24, 16, v_in_k=True)
    assert shape.moved_bytes == 2 * shape.kv_len * 24 * 4
    assert shape.flops == 2 * 4 * (24 + 16) * 2 * shape.kv_len
    report = bench_attention(shape, backend="torch", peer="none", device=cpu_facts())
    assert report.results[0].error < 8.0


def test_latents_in_float8_have_a_scale_for_each_row():
    shape = small(**LATENTS, batch_size=2, kv_dtype="fp8")
    assert shape.moved_bytes == 2 * shape.kv_len * (16 + 4 + 8 * 4)
    report = bench_attention(shape, backend="torch", peer="none", device=cpu_facts())
    assert report.results[0].error < 8.0


def test_the_suite_of_latents_has_other_loads():
    decodes = [each for each in suite(small(**LATENTS)) if each.phase == "decode"]
    loads = {(each.batch_size, each.kv_len) for each in decodes}
    assert loads == {(batch, keys) for batch in (1, 16, 64) for keys in (1024, 8192)}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads must be 1 with latents, got 2; change --num-kv-heads"),
        ({"latent_rank": 25}, "latent_rank must be at most 24, the columns, got 25; change"),
        ({"latent_rank": 0}, "latent_rank must be at least 1, got 0; change --latent-rank"),
    ],
)
def test_latents_that_make_no_sense_are_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        small(**LATENTS | changes)


def test_flashinfer_as_a_peer_has_no_latents(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    text = "latents are another wrapper's: name flashinfer_mla among --backends"
    assert flashinfer_peer.absence(small(**LATENTS), "cuda") == text
