"""Device types: declarations by plugins, comparison of architectures, and opening."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from importlib_metadata import EntryPoint

from attnplug import Capabilities, Problem, UsageError
from attnplug.declare.device import SM, DeviceSpec, Processor
from attnplug.declare.errors import PluginError, PluginWarning
from attnplug.host import load_registry
from attnplug.machine.runtime import open_device, runtime_of
from attnplug.registry.loading import Broken
from attnplug_testing.plugins import EMBEDDED, Install, also, bringing, module, spec


class Generation(int):
    def unmet(self, requirement: int) -> str | None:
        return None if self >= requirement else f"generation {requirement}"


@pytest.mark.parametrize(
    ("sm", "requirement", "needed"),
    [
        (80, (80, None), None),
        (75, (80, None), "SM 80 or newer"),
        (90, (None, 80), "SM 80 or older"),
        (90, (100, 103), "SM 100 to 103"),
        (100, (100, 103), None),
        (80, (90, 90), "SM 90"),
        (80, (None, None), None),
    ],
)
def test_sm_ranges_are_compared_by_cuda_s_architecture(
    sm: int, requirement: tuple[int | None, int | None], needed: str | None
) -> None:
    assert SM(sm).unmet(requirement) == needed


def test_a_requirement_is_compared_by_the_architecture_of_its_device() -> None:
    """E2, D3"""
    can = Capabilities({"mha"}, {"acme", "cuda"}, {"float32"}, min_sm=90, architectures={"acme": 3})
    fast = spec(capabilities=can, factory="attnplug:Geometry")
    problem = Problem(device="acme", architecture=Generation(2))
    assert [(refusal.code, refusal.value, refusal.allowed) for refusal in fast.refusals(problem)] == [
        ("architecture", "2", "generation 3")
    ]
    for met in (
        Problem(device="acme", architecture=Generation(3)),
        Problem(device="acme"),  # undecided
        Problem(device="acme", sm=80),  # of another device
        Problem(device="cuda", sm=90, architecture=Generation(2)),
    ):
        assert fast.refusals(met) == []
    assert [refusal.code for refusal in fast.refusals(Problem(device="cuda", sm=80))] == ["sm"]


def test_a_comparison_that_fails_refuses_its_own_backend_only() -> None:
    """D2"""
    can = Capabilities({"mha"}, {"acme"}, {"float32"}, architectures={"acme": "third"})
    problem = Problem(device="acme", architecture=Generation(2))
    (refusal,) = spec(capabilities=can, factory="attnplug:Geometry").refusals(problem)
    assert refusal.code == "architecture"
    for text in ("'third'", "acme", "TypeError"):
        assert text in refusal.message


def test_a_backend_for_any_device_serves_one_that_core_has_never_heard_of() -> None:
    """E2"""
    can = Capabilities({"mha"}, None, {"float32"})
    assert spec(capabilities=can, factory="attnplug:Geometry").refusals(Problem(device="tpu")) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "cuda:0"},
        {"name": "NPU"},
        {"name": 7},
        {"name": "acme", "detect": None},
        {"name": "acme", "streams": True},
        {"name": "acme", "graphs": "Graph"},
    ],
    ids=str,
)
def test_a_wrong_declaration_of_a_device_leads_to_its_hook(
    install: Install, only_fault: Callable[[EntryPoint], Broken], wrong: dict[str, Any]
) -> None:
    """D2"""
    with pytest.raises(PluginError) as caught:
        DeviceSpec(**wrong)
    assert str(wrong["name"]) in str(caught.value)
    error = only_fault(install(also(module(), attnplug_devices=[wrong]))).error
    assert "attnplug_devices" in error or "DeviceSpec" in error


def test_two_packages_cannot_claim_one_device_and_core_keeps_its_own(install: Install) -> None:
    """D2"""
    points = [
        install(also(bringing(spec(name)), attnplug_devices=[DeviceSpec("acme"), DeviceSpec("cpu")]), name, name)
        for name in ("one", "two")
    ]
    registry = load_registry([EMBEDDED, *points], {})
    assert set(registry.devices) == {"cpu", "cuda"}
    assert registry.devices["cpu"].source.embedded
    assert [(fault.name, fault.source.distribution) for fault in registry.broken] == [
        ("device acme", "one"),
        ("device acme", "two"),
        ("device cpu", "one"),
        ("device cpu", "two"),
    ]
    with pytest.raises(UsageError) as caught:
        registry.device("acme")
    for text in ("'acme'", "cpu, cuda", "one 1.2.3", "two 1.2.3"):
        assert text in str(caught.value)


def no_driver() -> list[Processor]:
    raise OSError("no driver")


def exiting() -> NoReturn:
    print("no driver")
    os._exit(3)


@pytest.mark.parametrize("detect", [no_driver, lambda: ["Acme A2"], lambda: None, sys.exit, exiting])
def test_a_plugin_that_cannot_list_its_devices_is_named_and_disturbs_no_other(
    install: Install, detect: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """D2: its output is not part of a command's output either."""
    point = install(also(module(), attnplug_devices=[DeviceSpec("acme", detect)]))
    registry = load_registry([EMBEDDED, point], {})
    with pytest.warns(PluginWarning, match=r"device acme \(fast-attention 1.2.3\)"):
        assert registry.processors("acme") == ()
    assert len(registry.processors("cpu")) == 1 and not capsys.readouterr().out


@pytest.mark.parametrize(
    "declared",
    [
        DeviceSpec("acme"),
        DeviceSpec("acme", module="no_such_module"),
        DeviceSpec("meta"),
        DeviceSpec("cpu", lambda: ["Acme A2"]),  # type: ignore[list-item]
    ],
    ids=str,
)
def test_a_device_that_cannot_be_opened_is_a_usage_error_of_one_line(declared: DeviceSpec) -> None:
    """E2: torch does not know it, it has no memory, or its plugin lists something else than devices."""
    with pytest.raises(UsageError) as caught:
        open_device(declared.name, {declared.name: declared}.__getitem__)
    assert caught.value.settings == ("device",)
    assert declared.name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cuda:1", "cpu:0", "CPU", "meta", ""])
def test_a_device_is_named_by_its_type_without_an_index(name: str) -> None:
    """E2"""
    with pytest.raises(UsageError, match=r"cpu, cuda, without an index") as caught:
        load_registry([EMBEDDED], {}).device(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("changes", [{"streams": True}, {"graphs": "CUDAGraph"}])
def test_a_module_without_the_declared_interface_is_refused_when_it_is_opened(changes: dict[str, Any]) -> None:
    """E2: not in the middle of a run. The module has nothing of it but the class of graphs."""
    partial = ModuleType("torch_acme")
    partial.__dict__["CUDAGraph"] = object
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch_acme", partial)
        with pytest.raises(UsageError, match=r"torch_acme.*no attribute") as caught:
            open_device("cpu", {"cpu": DeviceSpec("cpu", module="torch_acme", **changes)}.__getitem__)
    assert "\n" not in str(caught.value)


def test_a_cpu_is_opened_without_an_index_and_has_no_streams() -> None:
    device, processor = open_device("cpu", load_registry([EMBEDDED], {}).device)
    assert (device, processor.sm, processor.architecture) == (torch.device("cpu"), 0, None)
    assert (runtime_of(device).module, runtime_of(device).graph, runtime_of(device).pinned) == (None, None, False)


def test_cuda_runs_on_torch_s_module() -> None:
    runtime = runtime_of(torch.device("cuda", 1))
    assert (runtime.module, runtime.graph, runtime.pinned) == (torch.cuda, torch.cuda.CUDAGraph, True)
