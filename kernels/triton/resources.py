"""What a compiled kernel takes of a processor, read out of what the compilers say."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PTX_LOAD = re.compile(r"\bld\.global\S*?(?:\.v(\d))?\.[busf](\d+)\b")
_PTX_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b[^;]*?,\s*0x([0-9a-f]+)|"
                        r"\bcp\.async\.c[ag]\.shared\.global\b[^;]*?,\s*(\d+)")  # fmt: skip
_AMD_LOAD = re.compile(
    r"\b(?:global|buffer)_load_(dwordx(\d)|dword|b(\d+)|[us]?(?:byte|short)\w*|[ui](8|16)\w*)"
)
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"\bREG:(\d+)\b")
_AMD_REGISTERS = re.compile(r"\.vgpr_count:\s+(\d+)")
_AMD_SPILLS = re.compile(r"\.vgpr_spill_count:\s+(\d+)")
_AMD_SCRATCH = re.compile(r"\.private_segment_fixed_size:\s+(\d+)")

SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that one program can have."""


class UnreadableReport(ValueError):
    """A compiler's report does not say what is looked for."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Attributes:
    registers: per thread (of AMD: vector registers).
    spill_bytes: per thread, written to memory for want of registers.
    shared_bytes: of shared memory, per program.
    load_bits: the widest load of a thread from global memory.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    load_bits: int


def nvidia_resources(usage: str, verbose: str, ptx: str, shared_bytes: int) -> Resources:
    """From ``cuobjdump -res-usage`` of the cubin, ``ptxas -v`` of the PTX, and the PTX."""
    registers = _REGISTERS.search(usage)
    spills = _SPILLS.search(verbose)
    if registers is None or spills is None:
        raise UnreadableReport(f"no registers or spills in {usage + verbose!r}")
    return Resources(int(registers[1]), int(spills[1]), shared_bytes, ptx_load_bits(ptx))


def amd_resources(assembly: str, shared_bytes: int) -> Resources:
    """From the assembly, whose metadata end it."""
    registers, spills = _AMD_REGISTERS.search(assembly), _AMD_SPILLS.search(assembly)
    scratch = _AMD_SCRATCH.search(assembly)
    if registers is None or spills is None or scratch is None:
        raise UnreadableReport("no register counts in the assembly")
    spilled = max(4 * int(spills[1]), int(scratch[1]))
    return Resources(int(registers[1]), spilled, shared_bytes, amd_load_bits(assembly))


def ptx_load_bits(ptx: str) -> int:
    """The widest load from global memory; 0 without any."""
    plain = [int(m[1] or 1) * int(m[2]) for m in _PTX_LOAD.finditer(ptx)]
    copies = [8 * (int(m[1], 16) if m[1] else int(m[2])) for m in _PTX_ASYNC.finditer(ptx)]
    return max(plain + copies, default=0)


def amd_load_bits(assembly: str) -> int:
    """The widest load from global memory; 0 without any."""
    widths = [0]
    for found in _AMD_LOAD.finditer(assembly):
        if found[2]:
            widths.append(32 * int(found[2]))
        elif found[3] or found[4]:
            widths.append(int(found[3] or found[4]))
        elif found[1] == "dword":
            widths.append(32)
        else:
            widths.append(8 if "byte" in found[1] else 16)
    return max(widths)
