"""The attention benchmark: it checks before it times, and its numbers follow from the shape."""

import importlib.machinery
import json
import sys
from pathlib import Path

import fake_flashinfer
import jsonschema
import pytest
import torch
from click.testing import CliRunner

from paceline.cli.app import app
from paceline.core.errors import BackendUnsupported, ConfigError, IntegrityError
from paceline.core.gpus import GPUS, published_row
from paceline.engine import flashinfer_peer, interleaved
from paceline.engine.attention_shape import AttentionShape
from paceline.engine.attention_workload import make_workload
from paceline.engine.bench_attention import (
    bench_attention,
    check,
    choose_peer,
    main,
    our_make,
    ragged_lens,
    require_memory,
)
from paceline.engine.machine import cpu_facts

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "bench_attention.json"
CPU = torch.device("cpu")
SMALL = {"batch_size": 4, "kv_len": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def small(**changes):
    return AttentionShape(**{**SMALL, "dtype": "float32", "page_size": 4, **changes})


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    monkeypatch.setattr(interleaved, "ROUNDS", 3)
    monkeypatch.setattr("paceline.engine.bench_attention.CPU_SPAN_BYTES", 1)


@pytest.fixture
def flashinfer(monkeypatch):
    """FlashInfer, as far as anything here can tell."""
    spec = importlib.machinery.ModuleSpec("flashinfer", None)
    monkeypatch.setattr(fake_flashinfer, "__spec__", spec)
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)


@pytest.mark.parametrize("extend_len", [1, 5])
def test_the_document_fits_its_schema(extend_len):
    document = bench_attention(small(extend_len=extend_len))
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert [row["name"] for row in document["results"]] == ["torch"]
    assert document["ratio"] is None
    assert document["versions"]["torch"] == torch.__version__


def test_both_command_lines_end_with_the_document(capsys):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    words += ["--dtype", "float32", "--page-size", "4"]
    done = CliRunner().invoke(app, ["bench", "attention", *words])
    assert done.exit_code == 0, done.output
    assert main(words) == 0
    for text in (done.stdout, capsys.readouterr().out):
        lines = text.splitlines()
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
        check({"torch": our_make("torch"), "broken": make}, small(), CPU)


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
    errors = check(makes, shape, CPU)
    names = {"flashinfer tensor cores", "flashinfer"} if extend_len == 1 else {"flashinfer"}
    assert set(errors) == names


def test_a_peer_is_compared_by_its_better_kernel(flashinfer, monkeypatch):
    monkeypatch.setattr(flashinfer_peer, "absence", lambda shape, device_type: None)
    document = bench_attention(small(), peer="flashinfer")
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
