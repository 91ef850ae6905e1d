"""Contenders: which class runs a case, and what it is asked beforehand."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from rig_cases import CASES, CPU, DECODE, EXTEND, FROZEN_KV, TREE

from paceline.attention.backends.flashinfer_backend import FlashInferBackend
from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import GraphSupport
from paceline.core.errors import ConfigError
from paceline.core.model.config import Heads
from paceline.core.modes import MaskKind
from paceline.proof.check.cell import RunnerKind
from paceline.proof.rig.contenders import EMULATORS, Contender, contender, for_case, refusals

WINDOWS = CASES["swa/decode/tiny-window6-soft-cap"]
FP8 = CASES["dense/decode/fp8-cache"]


class Asked(TorchBackend):
    """Refuses with what it is asked."""

    def unsupported_reasons(self, config):
        return [config]


def asked(case, runner=RunnerKind.RECORDED, *, emulated=False, backend=Asked):
    who = Contender(name="asked", backend=backend(), is_emulated=emulated)
    (config,) = refusals(case, who, runner, CPU)
    return config


@pytest.mark.parametrize("name", sorted(EMULATORS))
def test_a_vendors_backend_is_on_its_emulator_on_a_cpu_alone(name):
    emulated, real = contender(name, "cpu"), contender(name, "cuda")
    assert emulated.is_emulated
    assert not real.is_emulated
    assert real.backend.library is None
    assert emulated.backend == replace(real.backend, library=import_module(EMULATORS[name]))


def test_our_own_backend_is_itself():
    assert contender("torch", "cpu") == Contender(
        name="torch", backend=TorchBackend(), is_emulated=False
    )


def test_a_pair_is_emulated_when_a_half_is():
    assert contender("triton+flashinfer", "cpu").is_emulated
    assert not contender("torch+torch", "cpu").is_emulated
    assert not contender("triton+flashinfer", "cuda").is_emulated


@pytest.mark.parametrize(
    "name", ["cascade(flashinfer)", "torch+cascade(fa4)", "cascade(fa4+torch)"]
)
def test_a_cascade_by_name_is_emulated_when_what_is_in_it_is(name):
    assert contender(name, "cpu").is_emulated
    assert not contender(name, "cuda").is_emulated
    assert MaskKind.TREE in contender(name, "cpu").backend.capabilities.masks


def test_a_class_of_the_name_is_imported():
    found = contender("rogue_backends:Faultless", "cpu")
    assert type(found.backend).__name__ == "Faultless"
    assert not found.is_emulated


@pytest.mark.parametrize("name", ["", "no-such", "torch+no-such", "no_such_module:Class"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ConfigError):
        contender(name, "cpu")


def test_a_case_says_what_it_asks():
    config = asked(DECODE)
    assert (config.device_type, config.cuda_arch) == ("cpu", None)
    assert (config.dtype, config.kv_dtype) == (torch.float16, torch.float16)
    assert (config.page_size, config.heads) == (16, (Heads(4, 2, 64, 64),))
    assert config.masks == {MaskKind.CAUSAL}
    assert {config.window, config.soft_cap, config.sinks, config.needs_lse} == {False}
    assert asked(WINDOWS).window
    assert asked(WINDOWS).soft_cap
    assert asked(FROZEN_KV).needs_lse
    assert asked(FP8).kv_dtype is torch.float8_e4m3fn
    assert asked(replace(DECODE, sinks=True)).sinks
    assert asked(TREE).masks == {MaskKind.TREE}


@pytest.mark.parametrize(
    ("case", "needed"),
    [
        (DECODE, GraphSupport.DECODE),
        (TREE, GraphSupport.UNIFORM),
        (FROZEN_KV, GraphSupport.DECODE),
        (EXTEND, GraphSupport.ALWAYS),
    ],
    ids=lambda each: getattr(each, "name", None),
)
def test_a_graph_is_asked_of_graph_runners_alone(case, needed):
    assert asked(case, RunnerKind.EAGER).graph is GraphSupport.NEVER
    assert asked(case, RunnerKind.RECORDED).graph is needed


def test_an_emulated_backend_is_asked_as_on_a_hopper():
    config = asked(DECODE, emulated=True)
    assert (config.device_type, config.cuda_arch) == ("cuda", (9, 0))


def with_capabilities(**changes):
    made = replace(TorchBackend.capabilities, **changes)
    return type("Other", (TorchBackend,), {"capabilities": made})()


def test_trees_run_by_cascade_where_a_mask_is_missing_and_an_lse_is_there():
    causal = with_capabilities(masks=frozenset({MaskKind.CAUSAL}))
    mute = with_capabilities(masks=frozenset({MaskKind.CAUSAL}), returns_lse=False)

    def runs(backend, case):
        return for_case(Contender(name="x", backend=backend, is_emulated=False), case)

    assert runs(TorchBackend, TREE) is TorchBackend
    assert runs(causal, DECODE) is causal
    assert runs(causal, TREE).inner is causal
    assert runs(mute, TREE) is mute
    who = Contender(name="x", backend=mute, is_emulated=False)
    assert any("tree" in reason for reason in refusals(TREE, who, RunnerKind.EAGER, CPU))


def test_a_windowed_tree_of_flashinfer_runs_by_cascade():
    tree = CASES["swa/target_verify/window4-topk2"]
    assert for_case(contender("flashinfer", "cuda"), tree).inner == FlashInferBackend()


def test_reasons_that_are_no_list_are_a_fault_of_the_backend():
    class Talks(TorchBackend):
        @classmethod
        def unsupported_reasons(cls, config):
            return "no"

    with pytest.raises(TypeError, match="unsupported_reasons must return a list of texts, got 'no"):
        asked(DECODE, backend=Talks)
