"""What is measured, and what each measurement is held against: plain numbers, no device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Roofs:
    """What the device does at best, measured here.

    Attributes:
        copy_rate: bytes per second, read and written, of a copy of a GiB.
        matrix_rate: operations per second of a product of bfloat16 matrices of 8192.
    """

    copy_rate: float
    matrix_rate: float


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """A batch of equal sequences.

    Attributes:
        batch: sequences.
        query_len: queries of each, at its end.
        context: positions of each, queries included.
        kv_heads, group, head_dim: as the model has them.
        dtype, kv_dtype: names of torch's dtypes.
    """

    batch: int
    query_len: int
    context: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values that one call has to read, scales left out."""
        return 2 * self.batch * self.context * self.kv_heads * self.head_dim * itemsize

    def flops(self) -> int:
        """Of the two products over the pairs that the causal mask leaves."""
        before = self.context - self.query_len
        pairs = self.query_len * before + self.query_len * (self.query_len + 1) // 2
        return 4 * self.batch * pairs * self.kv_heads * self.group * self.head_dim

    def label(self) -> str:
        """For a table."""
        kind = "decode" if self.query_len == 1 else "prefill"
        return (
            f"{kind} {self.batch} x {self.query_len} at {self.context}, heads "
            f"{self.kv_heads * self.group}/{self.kv_heads}, dim {self.head_dim}, "
            f"{self.dtype} over {self.kv_dtype}"
        )


DECODES = (
    AttentionShape(64, 1, 4096, 8, 4, 128),
    AttentionShape(64, 1, 4096, 8, 4, 128, kv_dtype="float8_e4m3fn"),
    AttentionShape(64, 1, 4096, 8, 4, 128, kv_dtype="int8"),
    AttentionShape(1, 1, 32768, 8, 4, 128),
    AttentionShape(64, 1, 2048, 3, 3, 64),
)
PREFILLS = (
    AttentionShape(1, 8192, 8192, 8, 4, 128),
    AttentionShape(4, 2048, 8192, 8, 4, 128),
    AttentionShape(1, 8192, 8192, 8, 4, 128, kv_dtype="float8_e4m3fn"),
    AttentionShape(8, 1024, 1024, 3, 3, 64),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        what: the work.
        took_s: median time of one call.
        rate, unit: what that is per second.
        roof: the same unit, measured on the same device: of a copy, of a matrix product, of memory.
    """

    what: str
    took_s: float
    rate: float
    unit: str
    roof: float | None

    @property
    def share(self) -> float | None:
        """Of the roof."""
        return self.rate / self.roof if self.roof else None


def decode_row(shape: AttentionShape, itemsize: int, took_s: float, copy_rate: float) -> Row:
    """Bytes of KV per second beside those that a copy reads and writes."""
    return Row(shape.label(), took_s, shape.kv_bytes(itemsize) / took_s, "B/s", copy_rate)


def prefill_row(shape: AttentionShape, took_s: float, matrix_rate: float) -> Row:
    """Operations per second beside those of a matrix product."""
    return Row(shape.label(), took_s, shape.flops() / took_s, "FLOP/s", matrix_rate)


def step_row(what: str, took_s: float, num_bytes: int, copy_rate: float) -> Row:
    """A decode step: its floor is reading weights and KV once."""
    return Row(what, took_s, num_bytes / took_s, "B/s", copy_rate)


def table(rows: Sequence[Row]) -> str:
    """For people and for documents."""
    lines = ["| work | time | rate | of the roof |", "|---|---|---|---|"]
    for row in rows:
        share = "" if row.share is None else f"{row.share:.2f}"
        lines.append(f"| {row.what} | {row.took_s * 1e6:.0f} µs | {_rate(row)} | {share} |")
    return "\n".join(lines)


def _rate(row: Row) -> str:
    scaled = row.rate / (1e12 if row.unit == "FLOP/s" else 1e9)
    return f"{scaled:.0f} {'T' if row.unit == 'FLOP/s' else 'G'}{row.unit}"


def best(candidates: Sequence[str], time_s: Callable[[str], float | None]) -> str | None:
    """The candidate of the least time; one without a time cannot be launched. None: none can."""
    timed = [(took, name) for name in candidates if (took := time_s(name)) is not None]
    return min(timed)[1] if timed else None


def middle(times_s: Sequence[float]) -> float:
    """The median."""
    return float(median(times_s))
