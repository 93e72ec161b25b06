"""Compiles the kernels ahead of time, without a GPU, and prints what they take of one.

    python -m kvferry.kernels.triton.ahead [--target sm_90 ...] [--all] [--json | --markdown]

Every target is compiled to machine code. The exit code is 1 where a kernel spills registers or
wants more shared memory than there is. Must not run under Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from kvferry.kernels.triton.resources import (
    SHARED_LIMIT,
    Resources,
    amd_resources,
    nvidia_resources,
)
from kvferry.kernels.triton.variants import Variant, few, many
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""By architecture: A100, H100 and H200, B200, MI300."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A variant on a target."""

    target: str
    variant: Variant
    resources: Resources

    def problems(self) -> list[str]:
        """What would make it slow, or impossible to launch."""
        found = []
        if self.resources.spill_bytes:
            found.append(f"spills {self.resources.spill_bytes} bytes")
        limit = SHARED_LIMIT[self.target]
        if self.resources.shared_bytes > limit:
            found.append(f"wants {self.resources.shared_bytes} bytes of shared memory of {limit}")
        return found


def compile_variant(variant: Variant, target: str) -> Compiled:
    """To machine code, with Triton's cache where it is."""
    gpu = TARGETS[target]
    places = {name: place for place, name in enumerate(variant.kernel.arg_names)}
    source = ASTSource(
        fn=variant.kernel,
        signature=dict(variant.types),
        constexprs=dict(variant.constants),
        attrs={(places[name],): [["tt.divisibility", 16]] for name in sorted(variant.wide)},
    )
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": True,
    }
    built = triton.compile(source, target=gpu, options=options)
    shared = int(built.metadata.shared)
    if gpu.backend == "hip":
        return Compiled(target, variant, amd_resources(built.asm["amdgcn"], shared))
    return Compiled(target, variant, _nvidia(built, gpu, shared))


def _nvidia(built: Any, gpu: GPUTarget, shared: int) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(built.asm["cubin"])
        ptx.write_text(built.asm["ptx"], encoding="utf-8")
        usage = _run([str(_TOOLS / "cuobjdump"), "-res-usage", str(cubin)])
        # Of 9.0 and 10.0 Triton's PTX needs the instructions of exactly that processor.
        suffix = "a" if gpu.arch >= 90 else ""
        verbose = _run(
            [
                str(_TOOLS / "ptxas-blackwell"),
                "-v",
                f"--gpu-name=sm_{gpu.arch}{suffix}",
                str(ptx),
                "-o",
                str(Path(folder, "again.cubin")),
            ]
        )
    return nvidia_resources(usage, verbose, built.asm["ptx"], shared)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: {done.stderr}")
    return done.stdout + done.stderr


def compile_all(targets: Sequence[str], every: bool) -> Iterator[Compiled]:
    """The few or all variants on each target."""
    for target in targets:
        for variant in many(target) if every else few(target):
            yield compile_variant(variant, target)


def markdown(rows: Sequence[Compiled]) -> str:
    """A table for documents, variants in its rows and targets in its columns."""
    targets = list(dict.fromkeys(row.target for row in rows))
    lines = [
        "| kernel | " + " | ".join(targets) + " |",
        "|---|" + "---|" * len(targets),
    ]
    by_name: dict[str, dict[str, Resources]] = {}
    for row in rows:
        by_name.setdefault(row.variant.name, {})[row.target] = row.resources
    for name, found in by_name.items():
        cells = [_cell(found[target]) if target in found else "" for target in targets]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(found: Resources) -> str:
    spills = f", **{found.spill_bytes} B spilled**" if found.spill_bytes else ""
    return f"{found.registers} / {found.shared_bytes} / {found.load_bits}{spills}"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.kernels.triton.ahead")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: every one")
    parser.add_argument(
        "--all", action="store_true", help="every variant, not the few of the tests"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    rows = []
    for row in compile_all(options.target or list(TARGETS), options.all):
        rows.append(row)
        if not options.json and not options.markdown:
            found = row.resources
            print(
                f"{row.target:7} {found.registers:4} registers {found.spill_bytes:5} B spilled "
                f"{found.shared_bytes:7} B shared {found.load_bits:4} bits  {row.variant.name}",
                flush=True,
            )
    if options.markdown:
        print(markdown(rows))
    if options.json:
        shown = [
            {"target": r.target, "kernel": r.variant.name, **asdict(r.resources)} for r in rows
        ]
        print(json.dumps(shown, indent=1))
    problems = [f"{r.target} {r.variant.name}: {text}" for r in rows for text in r.problems()]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
