"""Measured times decide, over what all candidates share, on the nearest layer of the same GPU."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from paceline.attention.measurements import (
    LayerShape,
    Measurement,
    fastest,
    merged,
    package_table,
    parse_table,
    write_table,
)
from paceline.attention.preference import prefer, prefer_for_all
from paceline.attention.ragged.registry import AUTO_ORDER
from paceline.attention.registry import BACKENDS
from paceline.core.errors import ConfigError

LLAMA = LayerShape(
    num_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype="bfloat16", kv_dtype="bfloat16"
)
ROW = Measurement(
    gpu="NVIDIA H200",
    phase="decode",
    batch_size=64,
    kv_len=4096,
    extend_len=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=16,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    backend="a",
    us=100.0,
    error=0.1,
    date="2026-01-01",
    versions={"torch": "2.11.0"},
)


def row(backend, us, **changes):
    return replace(ROW, backend=backend, us=us, **changes)


def ranked(table, *names, phase="decode", gpu="NVIDIA H200", layer=LLAMA):
    return fastest(gpu, phase, layer, names, table=table)


def chosen(table, *names, phase="decode", gpu="NVIDIA H200", layer=LLAMA):
    return prefer(names, phase, gpu, layer=layer, table=table)


def test_the_fastest_comes_first():
    found = ranked([row("a", 100.0), row("b", 80.0), row("c", 90.0)], "a", "b", "c")
    assert list(found.us) == ["b", "c", "a"]
    assert list(found.us.values()) == pytest.approx([80.0, 90.0, 100.0])
    assert found.unmeasured == ()


def test_loads_count_alike_whatever_their_length():
    """A geometric mean: b loses the long load by a tenth and halves the short one."""
    table = [row("a", 1000.0), row("b", 1100.0)]
    table += [row("a", 10.0, batch_size=1), row("b", 5.0, batch_size=1)]
    found = ranked(table, "a", "b")
    assert list(found.us) == ["b", "a"]
    assert found.us["b"] == pytest.approx(math.sqrt(1100 * 5))


def test_only_loads_that_all_have_are_compared():
    table = [row("a", 100.0), row("a", 1.0, batch_size=1), row("b", 90.0)]
    assert ranked(table, "a", "b").us == {"b": pytest.approx(90.0), "a": pytest.approx(100.0)}


def test_a_phase_and_a_gpu_have_rows_of_their_own():
    table = [
        row("a", 100.0),
        row("b", 50.0, phase="prefill"),
        row("b", 40.0, gpu="NVIDIA L4"),
        row("b", 110.0),
    ]
    assert list(ranked(table, "a", "b").us) == ["a", "b"]
    assert ranked(table, "a", "b", gpu="NVIDIA B200").us == {}
    assert ranked(table, "a", "b", phase="prefill").unmeasured == ("a", "b")


def test_forms_of_a_board_share_their_rows():
    table = [row("a", 100.0, gpu="NVIDIA H100 80GB HBM3"), row("b", 90.0, gpu="NVIDIA H100 80GB")]
    assert list(ranked(table, "a", "b", gpu="NVIDIA H100 80GB HBM3").us) == ["b", "a"]


@pytest.mark.parametrize(
    ("layer", "backend"),
    [
        (LLAMA, "a"),
        (replace(LLAMA, head_dim=64), "b"),
        (replace(LLAMA, num_heads=64, num_kv_heads=8), "a"),
        (replace(LLAMA, head_dim=64, kv_dtype="float8_e4m3fn"), "b"),
    ],
)
def test_the_nearest_layer_is_compared(layer, backend):
    table = [row("a", 10.0), row("b", 20.0)]
    table += [row("a", 20.0, head_dim=64), row("b", 10.0, head_dim=64)]
    assert next(iter(ranked(table, "a", "b", layer=layer).us)) == backend


def test_another_dtype_is_farther_than_any_usual_size():
    table = [row("a", 10.0, dtype="float16"), row("b", 20.0, dtype="float16")]
    table += [row("a", 20.0, head_dim=64, page_size=1), row("b", 10.0, head_dim=64, page_size=1)]
    assert next(iter(ranked(table, "a", "b").us)) == "b"


def test_layers_with_chunks_are_compared_with_layers_with_chunks():
    chunked = replace(LLAMA, chunk=8192)
    table = [row("a", 10.0), row("b", 5.0)]
    assert ranked(table, "a", "b", layer=chunked).us == {}
    table += [row("a", 10.0, chunk=4096), row("b", 20.0, chunk=4096)]
    assert list(ranked(table, "a", "b", layer=chunked).us) == ["a", "b"]
    assert list(ranked(table, "a", "b").us) == ["b", "a"]
    table += [row("a", 20.0, chunk=8192), row("b", 10.0, chunk=8192)]
    assert list(ranked(table, "a", "b", layer=chunked).us) == ["b", "a"]


# --- the preference -------------------------------------------------------------------------------


def test_the_fastest_is_chosen_with_the_numbers():
    found = chosen([row("a", 247.0), row("b", 53.14), row("c", 261.4)], "a", "b", "c")
    assert found.name == "b"
    assert found.why == (
        "fastest of b, a, c for decode on NVIDIA H200 (measured: 53.1 us against 247, 261)"
    )
    assert found.passed_over == {
        "a": ["247 us for decode against 53.1 of b"],
        "c": ["261 us for decode against 53.1 of b"],
    }


@pytest.mark.parametrize(("us", "name"), [(96.9, "b"), (97.1, "a")])
def test_another_than_the_first_must_be_faster_by_enough(us, name):
    assert chosen([row("a", 100.0), row("b", us)], "a", "b").name == name


def test_keeping_the_first_says_by_how_much():
    found = chosen([row("a", 100.0), row("b", 98.0)], "a", "b")
    assert found.why == (
        "first of b, a for decode on NVIDIA H200, where b is less than 3% faster "
        "(measured: 98.0 us against 100)"
    )
    assert found.passed_over == {"b": ["98.0 us for decode against 100 of a"]}


def test_a_candidate_without_a_measurement_is_passed_over_and_named():
    found = chosen([row("a", 100.0), row("b", 90.0)], "a", "b", "c")
    assert found.why.endswith("(measured: 90.0 us against 100); c not measured")
    assert found.passed_over["c"] == ["not measured for decode on NVIDIA H200"]


@pytest.mark.parametrize(
    ("table", "missing"), [([], "a, b"), ([row("a", 1.0)], "b"), ([row("b", 1.0)], "a, b")]
)
def test_without_a_comparison_the_first_is_taken_and_why_says_so(table, missing):
    found = chosen(table, "a", "b")
    assert found.name == "a"
    assert found.why == (
        f"first of a, b, which can run: no measurements of {missing} for decode on NVIDIA H200"
    )
    assert found.passed_over == {"b": ["not measured for decode on NVIDIA H200"]}


def test_another_layer_is_named_where_it_was_measured():
    found = chosen([row("a", 100.0), row("b", 9.0)], "a", "b", layer=replace(LLAMA, head_dim=64))
    assert "(measured with 32/8 heads of 128, page 16, bfloat16: 9.0 us against 100)" in found.why


# --- the file -------------------------------------------------------------------------------------


def test_a_table_survives_its_file(tmp_path: Path):
    path = tmp_path / "table.json"
    table = merged([], [row("b", 2.0), row("a", 1.0, batch_size=8), row("a", 1.5)])
    write_table(path, table)
    assert parse_table(path.read_text(), source="x") == table
    assert list(tmp_path.iterdir()) == [path]
    assert len(path.read_text().splitlines()) == 2 + len(table)


def test_rows_of_the_same_shape_and_backend_are_replaced():
    old = [row("a", 1.0), row("b", 2.0), row("a", 3.0, page_size=64)]
    new = [row("a", 9.0, date="2026-02-02"), row("a", 4.0, phase="prefill", extend_len=4096)]
    table = merged(old, new)
    assert sorted(found.us for found in table) == [2.0, 3.0, 4.0, 9.0]
    assert merged(table, table) == table


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("{", "text that is not JSON"),
        ("{}", "got a JSON dict"),
        ("[3]", "got a row of 3"),
        ('[{"us": 1}]', "got a row of ['us']"),
    ],
)
def test_another_file_is_refused(text, got):
    with pytest.raises(ConfigError) as caught:
        parse_table(text, source="FILE")
    message = str(caught.value)
    assert message.startswith("table of measurements in FILE must be a JSON list of rows")
    assert got in message
    assert message.endswith("name a new file, or one that it wrote")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("us", "fast"), ("us", 0.0), ("us", float("nan")), ("batch_size", None)),
        *(("head_dim", 0), ("page_size", 1.5), ("gpu", 3), ("phase", None), ("versions", [])),
    ],
)
def test_a_row_of_other_values_is_refused(name, value):
    text = json.dumps([{**asdict(ROW), name: value}])
    with pytest.raises(ConfigError, match=re.escape(f"got a row with {name} {value!r}; name a")):
        parse_table(text, source="FILE")


def test_the_package_has_a_table_of_backends_it_has():
    table = package_table()
    expanded = {found.backend for found in table if found.phase == "expanded"}
    assert expanded == set(AUTO_ORDER)  # all of whom auto chooses among
    assert {found.backend for found in table if found.phase != "expanded"} <= set(BACKENDS)
    assert merged([], table) == table
    assert all(found.us > 0 for found in table)
    assert json.dumps([found.date for found in table])


# --- several kinds of layers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "chunks", "name", "why", "of_b"),
    [
        (5.0, 5.0, "b", "fastest of b, a for decode on", None),
        (5.0, None, "a", "no measurements of a, b for decode of chunks on", "preferred for 32/8"),
        (20.0, 5.0, "a", "fastest of a, b for decode on", "16, bfloat16, chunks of 8192 alone"),
        (5.0, 20.0, "a", "fastest of a, b for decode of chunks on", "for decode of chunks against"),
    ],
)
def test_another_than_the_first_must_be_faster_with_chunks_and_without(
    plain, chunks, name, why, of_b
):
    table = [row("a", 10.0), row("b", plain)]
    if chunks is not None:
        table += [row("a", 10.0, chunk=8192), row("b", chunks, chunk=8192)]
    layers = (LLAMA, replace(LLAMA, chunk=8192))
    found = prefer_for_all(("a", "b"), "decode", "NVIDIA H200", layers=layers, table=table)
    assert found.name == name
    assert why in found.why
    assert found.passed_over.keys() == {"a", "b"} - {name}
    assert of_b is None or of_b in "; ".join(found.passed_over["b"])


def test_who_is_preferred_for_some_layers_alone_is_passed_over():
    table = [row("a", 10.0), row("b", 5.0), row("c", 20.0)]
    table += [row("a", 10.0, chunk=64), row("b", 20.0, chunk=64), row("c", 5.0, chunk=64)]
    layers = (LLAMA, replace(LLAMA, chunk=64))
    found = prefer_for_all("abc", "decode", "NVIDIA H200", layers=layers, table=table)
    assert (found.name, found.why) == (
        "a",
        "first of a, b, c: no other is preferred for all its layers",
    )
    assert len(found.passed_over["b"]) == len(found.passed_over["c"]) == 2
