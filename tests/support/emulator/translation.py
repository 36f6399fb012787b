"""Translates a kernel's source to C++: preprocessed for an architecture, with a function call for each piece of PTX."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from runner_svc.cuda.sources import kernel_folder

_ARCHITECTURES = {
    "sm_80": {"__CUDA_ARCH__": "800"},
    "sm_90a": {"__CUDA_ARCH__": "900", "__CUDA_ARCH_FEAT_SM90_ALL": "1"},
}
_PREDEFINED = {
    "__device__": "",
    "__global__": "",
    "__forceinline__": "inline",
    "__grid_constant__": "",
    "__launch_bounds__(...)": "",
    "__cluster_dims__(...)": "",
    "__align__(bytes)": "alignas(bytes)",
}
_NOTHING = "(void)0"
# Regular expressions that match PTX, with the statement for each: `{0}` is the first operand, outputs first.
_STATEMENTS = (
    (r"ex2\.approx", "{0} = emulator::exp2_approx({1})"),
    (r"rcp\.approx", "{0} = 1.0f / ({1})"),
    (r"cvt\.rn\.bf16x2\.f32", "{0} = emulator::to_bf16({1}) << 16 | emulator::to_bf16({2})"),
    (r"cvt\.rn\.f16x2\.f32", "{0} = emulator::to_f16({1}) << 16 | emulator::to_f16({2})"),
    (
        r".*cvt\.rn\.f16x2\.e4m3x2 %3, d",
        "{0} = emulator::expand_pair({4}), {1} = emulator::expand_pair(({4}) >> 16), "
        "{2} = emulator::expand_pair({5}), {3} = emulator::expand_pair(({5}) >> 16)",
    ),
    (
        r".*cvt\.rn\.f16x2\.e4m3x2 %1, high",
        "{0} = emulator::expand_pair({2}), {1} = emulator::expand_pair(({2}) >> 16)",
    ),
    (
        r".*cvt\.rn\.satfinite\.e4m3x2\.f32 low, %2, %1; cvt",
        "{0} = emulator::to_e4m3({1}) | emulator::to_e4m3({2}) << 8 | emulator::to_e4m3({3}) << 16 | "
        "emulator::to_e4m3({4}) << 24",
    ),
    (r"mov\.u32 %0, %%cluster_ctarank", "{0} = 0"),
    (r"barrier\.cluster|.*mapa|.*multicast", 'emulator::fail("clusters are not emulated")'),
    (r"mbarrier\.init", "emulator::barrier_init({0}, {1})"),
    (r"mbarrier\.arrive\.shared::cta", "emulator::barrier_arrive({0})"),
    (r"mbarrier\.arrive\.expect_tx", "emulator::barrier_expect({0}, {1})"),
    (r".*mbarrier\.try_wait\.parity", "emulator::barrier_try_wait({0}, {1}, {2})"),
    (r"cp\.async\.bulk\.prefetch", _NOTHING),
    (r"cp\.async\.bulk\.shared", "emulator::copy_bytes({0}, {1}, {2}, {3})"),
    (r"cp\.async\.mbarrier\.arrive\.noinc", "emulator::arrive_after_copies({0})"),
    (r"cp\.async\.bulk\.tensor\.3d", "emulator::copy_tensor({0}, {1}, {2}, {3}, {4}, {5})"),
    (r"ld\.shared(::cluster)?\.v4", "memcpy(&({0}), emulator::at({4}, 16), 16)"),
    (r"st\.shared\.v4", "{{ uint4 words{{{1}, {2}, {3}, {4}}}; memcpy(emulator::at({0}, 16), &words, 16); }}"),
    (r"st\.shared\.b32", "emulator::store({0}, {1})"),
    (r"st\.shared\.f32", "{{ float word = {1}; memcpy(emulator::at({0}, 4), &word, 4); }}"),
    (r"ld\.global\.nc\.s32 %0, \[%1 \+ 4\]", "{0} = ({1})[1]"),
    (r"ld\.global\.nc\.s32 %0, \[%1\]", "{0} = *({1})"),
    (r"wgmma\.commit_group", "emulator::commit_products()"),
    (r"wgmma\.wait_group", "emulator::wait_products({0})"),
    *((rf"bar\.sync {name}, %0", f"emulator::meet_named({name}, {{0}})") for name in (1, 2)),
    (r"bar\.arrive 2, %0", "emulator::arrive_named(2, {0})"),
    (r"bar\.sync %0, %1", "emulator::meet_named({0}, {1})"),
    (r"bar\.sync", "emulator::meet_named({0}, 128)"),
    (r"bar\.arrive %0, %1", "emulator::arrive_named({0}, {1})"),
    (r"sub\.rn\.bf16x2", "{0} = emulator::subtract_pairs({1}, {2}, emulator::kBf16)"),
    (r"sub\.rn\.f16x2", "{0} = emulator::subtract_pairs({1}, {2}, emulator::kF16)"),
    (r"mul\.rn\.bf16x2", "{0} = emulator::multiply_pairs({1}, {2}, emulator::kBf16)"),
    (r"mul\.rn\.f16x2", "{0} = emulator::multiply_pairs({1}, {2}, emulator::kF16)"),
    (r"lop3\.b32 %0, %1, %2, %3, 0xea", "{0} = ({1}) & ({2}) | ({3})"),
    (r"fence\.|wgmma\.fence|setmaxnreg|griddepcontrol", _NOTHING),
    (r"mma\.sync.*\.bf16\.", "emulator::multiply_fragments(emulator::kBf16, {all})"),
    (r"mma\.sync.*\.f16\.", "emulator::multiply_fragments(emulator::kF16, {all})"),
    (r"ldmatrix.*\.trans\.", "emulator::load_fragments({all}, true)"),
    (r"ldmatrix", "emulator::load_fragments({all}, false)"),
    (r"movmatrix", "{0} = emulator::transpose_fragment({1})"),
    (r"createpolicy", "{0} = 0"),
    (r"ld\.(acquire|relaxed)\.sys", "{0} = emulator::load_shared({1})"),
    (r"st\.(release|relaxed)\.sys", "emulator::store_shared({0}, {1})"),
    (r"mov\.u64 %0, %%globaltimer", "{0} = emulator::nanoseconds()"),
    (r"cp\.async\.cg", "emulator::copy_small({0}, {1}, {2})"),
    (r"cp\.async\.commit_group", "emulator::commit_copies()"),
    (r"cp\.async\.wait_group", "emulator::wait_copies({0})"),
)


def translated(name: str, defines: Mapping[str, int | str], arch: str) -> str:
    """Returns kernels/NAME.cu as C++. Raises ValueError for PTX that is not emulated."""
    source = (kernel_folder() / f"{name}.cu").read_text("utf-8")
    macros = [f"-D{key}={value}" for key, value in {**_PREDEFINED, **_ARCHITECTURES[arch], **defines}.items()]
    with_stubs = f"-I{Path(__file__).parent / 'stubs'}"
    command = ["g++", "-E", "-P", "-x", "c++", with_stubs, f"-I{kernel_folder()}", *macros, "-"]
    text = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    text = re.sub(
        r"extern __shared__ [^;]*?(\w+) (\w+)\[\];", r"\1* \2 = reinterpret_cast<\1*>(emulator::shared_memory());", text
    )
    return _without_ptx(text.replace("__shared__", "static"))  # blocks run one after another


def _without_ptx(text: str) -> str:
    parts, end = [], 0
    for found in re.finditer(r"\basm( volatile)?\s*\(", text):
        parts.append(text[end : found.start()])
        end = _closing(text, found.end())
        parts.append(_statement(text[found.end() : end]))
        end += 1
    return "".join(parts) + text[end:]


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one opened before `start`."""
    depth = 1
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', text[start:]):
        depth += {"(": 1, ")": -1}.get(found.group(), 0)
        if not depth:
            return start + found.start()
    raise ValueError("unbalanced parenthesis")


def _statement(ptx: str) -> str:
    """Returns the statement for `"text" : outputs : inputs : clobbers`."""
    template, rest = _leading_strings(ptx)
    operands = _operands(rest)
    if not template:
        return f"emulator::pin(&({operands[0]}))"
    product = re.search(r"wgmma\.mma_async.*?m64n(\d+)k(?:16|32)\.f32\.(bf16|f16|e4m3)\.", template)
    if product:
        count = int(product[1]) // 2
        others = operands[count:]
        held = "multiply_held" if template.rstrip(" ;}").endswith("p, 1, 1, 0") else "mix"
        call = "multiply" if len(others) == 3 else held
        kind = "emulator::k" + product[2].capitalize()
        return f"emulator::{call}(&({operands[0]}), {count}, {kind}, {', '.join(others)})"
    for pattern, statement in _STATEMENTS:
        if re.match(pattern, template, re.DOTALL):
            return statement.format(*operands, all=", ".join(operands))
    raise ValueError(f"PTX is not emulated: {template!r}")


def _leading_strings(ptx: str) -> tuple[str, str]:
    """Returns the template and the text after it."""
    found = re.match(r'\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', ptx)
    if found is None:
        raise ValueError(f"no PTX in {ptx!r}")
    strings = re.findall(r'"((?:[^"\\]|\\.)*)"', found[1])
    return "".join(strings).replace("\\n", " ").strip(" {"), ptx[found.end() :]


def _operands(rest: str) -> list[str]:
    """Returns the expressions that follow constraints, in order."""
    operands, constraint, place = [], re.compile(r'"[=+]?[a-z]"\s*\('), 0
    while found := constraint.search(rest, place):
        place = _closing(rest, found.end())
        operands.append(rest[found.end() : place])
    return operands
