"""Timings are kept for one key: card, driver, libraries, sources, model and sizes. Broken files cost a warning."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from runner_svc.timings import management_library
from runner_svc.timings import timings_key as key_module
from runner_svc.timings.start_timings import SizeTimings, StartTimings
from runner_svc.timings.timings_file import TimingsFile
from runner_svc.timings.timings_key import sources_hash, timings_key

KEY = {"card": "NVIDIA Test", "driver": "580.1", "sources": "abc"}


def measured() -> StartTimings:
    return StartTimings(
        SizeTimings({1: {"own": 0.5, "cuBLAS": 0.25}, 2: {"own": 0.5, "cuBLAS": 1.0}}, [2]),
        SizeTimings({64: {"cuBLAS": 0.125}}, []),
        [[1, 256, 0, 0, 0, 4_000_000], [0, 0, 64, 0, 0, 6_000_000]],
        SizeTimings({256: {"cuBLAS": 0.5, "cuBLAS, adding": 0.25}}, [256]),
    )


def kept(folder: Path, key: dict[str, str] = KEY) -> TimingsFile:
    file = TimingsFile(folder, key)
    file.timings.decode, file.timings.mixed = measured().decode, measured().mixed
    file.timings.step_costs, file.timings.verify = measured().step_costs, measured().verify
    file.keep()
    return file


def opened(folder: Path, key: dict[str, str] = KEY, *, reuse: bool = True) -> tuple[StartTimings, list[str], str]:
    """Returns the timings, and the events and the levels of the log lines."""
    with capture_logs() as lines:
        file = TimingsFile(folder, key, reuse=reuse)
    return file.timings, [line["event"] for line in lines], " ".join(line["log_level"] for line in lines)


def test_what_was_kept_is_used_for_the_same_key_alone(tmp_path: Path) -> None:
    assert opened(tmp_path)[0] == StartTimings()
    file = kept(tmp_path)
    assert opened(tmp_path) == (measured(), ["timings of an earlier start are used"], "info")
    for name in KEY:
        timings, events, level = opened(tmp_path, KEY | {name: "other"})
        assert timings == StartTimings() and "no earlier start" in events[0] and level == "info"
    assert opened(tmp_path, reuse=False)[0] == StartTimings()
    assert list(file.path.parent.iterdir()) == [file.path]


def test_only_news_are_written_and_over_the_old(tmp_path: Path) -> None:
    path = kept(tmp_path).path
    before = path.stat().st_ino
    TimingsFile(tmp_path, KEY).keep()
    assert path.stat().st_ino == before
    again = TimingsFile(tmp_path, KEY, reuse=False)
    again.timings.step_costs = [[1, 256, 0, 0, 0, 1]]
    again.keep()
    assert opened(tmp_path)[0] == StartTimings(step_costs=[[1, 256, 0, 0, 0, 1]])


def test_runners_that_start_at_once_read_whole_files(tmp_path: Path) -> None:
    def start(number: int) -> None:
        for turn in range(20):
            file = TimingsFile(tmp_path, KEY)
            assert len(file.timings.step_costs or []) in (0, 500)
            file.timings.step_costs = [[number, turn, 0, 0, 0, 1 + place] for place in range(500)]
            file.keep()

    with capture_logs() as lines, ThreadPoolExecutor(3) as runners:
        list(runners.map(start, (1, 2, 3)))
    assert {line["log_level"] for line in lines} == {"info"}
    assert [path.suffix for path in (tmp_path / "timings").iterdir()] == [".json"]


def test_other_users_may_read_the_file_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = kept(tmp_path).path
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_full_disk_is_a_warning_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept(tmp_path).path
    again = TimingsFile(tmp_path, KEY, reuse=False)
    again.timings.step_costs = [[1, 256, 0, 0, 0, 1]]
    with monkeypatch.context() as patch, capture_logs() as lines:
        patch.setattr(Path, "replace", lambda *paths: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        again.keep()
    assert [line["log_level"] for line in lines] == ["warning"] and list(path.parent.iterdir()) == [path]
    assert opened(tmp_path)[0] == measured()


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
        lambda text: "[]",
        lambda text: "\udc80",
        changed(lambda content: content["key"].update(card="another")),
        changed(lambda content: content.pop("timings")),
        changed(lambda content: content["timings"].update(news=1)),
        changed(lambda content: content["timings"]["decode"]["seconds"].update(zero={"own": 1.0})),
        changed(lambda content: content["timings"]["decode"]["seconds"].update({"4": {}})),
        changed(lambda content: content["timings"]["decode"]["seconds"]["1"].update(own=-1.0)),
        changed(lambda content: content["timings"]["decode"]["seconds"]["1"].update(own=float("nan"))),
        changed(lambda content: content["timings"]["decode"]["seconds"]["1"].update(own=10**400)),
        changed(lambda content: content["timings"]["decode"].update(sizes=[2, 1])),
        changed(lambda content: content["timings"]["mixed"].update(sizes=[True])),
        changed(lambda content: content["timings"].update(mixed=[])),
        changed(lambda content: content["timings"]["step_costs"][0].pop()),
        changed(lambda content: content["timings"].update(step_costs=[[1, 256, 0, 0, 0, 0]])),
        changed(lambda content: content["timings"].update(step_costs=[[1, 1 << 32, 0, 0, 0, 1]])),
        changed(lambda content: content["timings"].update(step_costs=[[1, 256, 0, 0, 0, 1 << 64]])),
    ],
)
def test_a_damaged_file_is_a_warning_and_is_replaced(damage: Callable[[str], str], tmp_path: Path) -> None:
    path = kept(tmp_path).path
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    timings, events, level = opened(tmp_path)
    assert timings == StartTimings() and level == "warning" and "can't be read" in events[0]
    kept(tmp_path)
    assert opened(tmp_path)[0] == measured()


@pytest.mark.parametrize("folder", ["/dev/full/cache", "/proc/cache"])
def test_a_folder_that_can_not_be_written_is_a_warning(folder: str) -> None:
    with capture_logs() as lines:
        kept(Path(folder))
    assert lines[-1]["log_level"] == "warning" and "can't be kept" in lines[-1]["event"]


def test_timings_of_other_variants_or_sizes_do_not_fit() -> None:
    decode = measured().decode
    assert decode is not None
    names = {1: ["own", "cuBLAS"], 2: ["cuBLAS", "own"]}
    assert decode.fits(names, [1, 2])
    assert not decode.fits(names, [1])
    assert not decode.fits(names | {4: ["own"]}, [1, 2, 4])
    assert not decode.fits({1: ["own"], 2: ["cuBLAS", "own"]}, [1, 2])


class FakeLibrary:
    """NVIDIA's management library of a machine with one card; with `failing`, calls return an error."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int:
        if name == self.failing:
            return 3
        if name == "nvmlSystemGetDriverVersion":
            arguments[0].value = b"580.159.03"
        elif name == "nvmlDeviceGetEnforcedPowerLimit":
            arguments[1]._obj.value = 700_000
        elif name == "nvmlDeviceGetHandleByPciBusId_v2":
            assert arguments[0] == b"0000:19:00.0"
        return 0


def test_driver_and_power_limit_are_those_of_the_management_library(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Callable[[], str]] = [
        management_library.driver_version,
        partial(management_library.power_limit, "0000:19:00.0"),
    ]
    monkeypatch.setattr(management_library, "_NAME", "libnothing-of-this-name.so")
    assert [each() for each in read] == ["", ""]
    for failing, expected in (
        ("", ["580.159.03", "700 W"]),
        ("nvmlInit_v2", ["", ""]),
        ("nvmlSystemGetDriverVersion", ["", "700 W"]),
        ("nvmlDeviceGetHandleByPciBusId_v2", ["580.159.03", ""]),
        ("nvmlDeviceGetEnforcedPowerLimit", ["580.159.03", ""]),
    ):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, failing=failing: FakeLibrary(failing))
        assert [each() for each in read] == expected


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the properties of the only GPU."""
    values: dict[str, Any] = {"name": "NVIDIA Test", "major": 9, "minor": 0, "total_memory": 141 << 30, "clock": 3201}
    device = SimpleNamespace(attributes={"MemoryClockRate": values["clock"]}, pci_bus_id="0000:19:00.0")
    runtime = SimpleNamespace(driverGetVersion=lambda: 13000)
    fake = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device, runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**values))
    values["attributes"] = device.attributes
    return values


def test_the_key_has_whatever_changes_times(
    card: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, options = {"hidden_size": 64, "eos_token_id": 2}, {"num_slots": 8, "fp8_cache": False}
    keys = [timings_key(config, torch.bfloat16, options)]
    assert timings_key(config | {"eos_token_id": 3}, torch.bfloat16, options) == keys[0]
    keys += [timings_key(config | {"hidden_size": 128}, torch.bfloat16, options)]
    keys += [timings_key(config, torch.float16, options)]
    keys += [timings_key(config, torch.bfloat16, options | {"num_slots": 16})]
    for name, value in (("name", "NVIDIA Other"), ("minor", 1), ("total_memory", 80 << 30)):
        monkeypatch.setitem(card, name, value)
        keys += [timings_key(config, torch.bfloat16, options)]
    monkeypatch.setitem(card["attributes"], "MemoryClockRate", 2619)
    keys += [timings_key(config, torch.bfloat16, options)]
    for name, value in (
        ("driver_version", "581.1"),
        ("power_limit", "500 W"),
        ("_processor", "another"),
        ("_version", "9.9"),
    ):
        monkeypatch.setattr(key_module, name, lambda *names, value=value: value)
        keys += [timings_key(config, torch.bfloat16, options)]
    for variable, value in (("CUDA_LAUNCH_BLOCKING", "1"), ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")):
        monkeypatch.setenv(variable, value)
        keys += [timings_key(config, torch.bfloat16, options)]
    for name in ("a.cuh", "b.py"):
        (tmp_path / name).write_text("new")
        sources_hash.cache_clear()
        monkeypatch.setattr(key_module, "kernel_folder", lambda: tmp_path)
        keys += [timings_key(config, torch.bfloat16, options)]
    sources_hash.cache_clear()
    assert len({json.dumps(key, sort_keys=True) for key in keys}) == len(keys)
