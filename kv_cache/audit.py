"""The audit: every block accounted for, from its owners.

Walks the owners that hold blocks (request tables, running reads, leases, the prefix index) and
rebuilds who owns what; each block counts once, under its strongest owner:

    referenced > in transfer > pinned > cached > free,   or quarantined

The class counts come from the owners alone. The pool's own state is then held against them:
a block nobody owns must be free to take (else it leaked), an owned one must not be; what only the
index leads to must be kept as cached, and nothing else.

The host tier is held against the sequences likewise: what is kept for none of them has leaked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvferry.kv_cache.block_pool import BlockPool
from kvferry.kv_cache.host_tier import HostKey, HostTier, TailKey


class BlockClass(StrEnum):
    """Disjoint classes, strongest owner first."""

    REFERENCED = "referenced"
    IN_TRANSFER = "in_transfer"
    PINNED = "pinned"
    CACHED = "cached"
    FREE = "free"
    QUARANTINED = "quarantined"


class OwnerKind(StrEnum):
    """What holds a block: a request's table, a peer's lease, a running read, the prefix index."""

    REQUEST = "request"
    READER = "reader"
    WRITER = "writer"
    INDEX = "index"


@dataclass(frozen=True, slots=True)
class Owner:
    """One holder of one block.

    ``request_id`` and ``attempt`` name the request that it is held for; ``peer`` the worker
    that may read it or that it is read from; ``lease_remaining_s`` how long a silent reader
    keeps it.
    """

    kind: OwnerKind
    block_id: int
    request_id: str
    attempt: int = 0
    peer: str = ""
    lease_remaining_s: float | None = None


@dataclass(frozen=True, slots=True)
class AuditedBlock:
    """One block that is not free."""

    block_id: int
    generation: int
    block_class: BlockClass
    ref_count: int
    num_tokens: int
    block_hash: bytes | None
    owners: tuple[Owner, ...]


@dataclass(frozen=True, slots=True)
class PoolAudit:
    """Counts per class (their sum is the pool), the problems found, and the blocks not free."""

    counts: dict[BlockClass, int]
    problems: tuple[str, ...]
    blocks: tuple[AuditedBlock, ...]

    @property
    def consistent(self) -> bool:
        """Whether the pool's state agrees with the owners."""
        return not self.problems


_STRENGTH = (
    (OwnerKind.REQUEST, BlockClass.REFERENCED),
    (OwnerKind.WRITER, BlockClass.IN_TRANSFER),
    (OwnerKind.READER, BlockClass.PINNED),
    (OwnerKind.INDEX, BlockClass.CACHED),
)


def audit(pool: BlockPool, owners: Iterable[Owner]) -> PoolAudit:
    """Rebuild the class of every block from ``owners`` and compare the pool with it."""
    by_block: dict[int, list[Owner]] = {}
    problems: list[str] = []
    for owner in owners:
        if 0 <= owner.block_id < pool.num_blocks:
            by_block.setdefault(owner.block_id, []).append(owner)
        else:
            problems.append(f"{_name(owner)} holds block {owner.block_id}, which does not exist")
    counts = dict.fromkeys(BlockClass, 0)
    audited: list[AuditedBlock] = []
    for block in pool.blocks:
        held = by_block.get(block.block_id, [])
        block_class = _classify(held, block.quarantined)
        counts[block_class] += 1
        problems.extend(_problems(pool, block.block_id, held))
        if block_class is not BlockClass.FREE:
            audited.append(
                AuditedBlock(
                    block.block_id,
                    block.generation,
                    block_class,
                    sum(owner.kind is OwnerKind.REQUEST for owner in held),
                    block.num_tokens,
                    block.block_hash,
                    tuple(held),
                )
            )
    return PoolAudit(counts, tuple(problems), tuple(audited))


def _classify(held: list[Owner], quarantined: bool) -> BlockClass:
    if quarantined:
        return BlockClass.QUARANTINED
    kinds = {owner.kind for owner in held}
    for kind, block_class in _STRENGTH:
        if kind in kinds:
            return block_class
    return BlockClass.FREE


def _problems(pool: BlockPool, block_id: int, held: list[Owner]) -> list[str]:
    block = pool.blocks[block_id]
    free, cached = pool.is_free(block_id), pool.is_cached(block_id)
    holders = [owner for owner in held if owner.kind is not OwnerKind.INDEX]
    found = len(holders) < len(held)
    if not holders and not free and not block.quarantined:
        return [f"block {block_id} leaked: no owner, yet not free ({_counts(block_id, pool)})"]
    if holders and free:
        names = ", ".join(_name(owner) for owner in holders)
        return [f"block {block_id} freed too often: on the free list, yet held by {names}"]
    if found and block.quarantined:
        return [f"block {block_id} is quarantined, yet the index leads to it"]
    if free and found != cached:
        leads = (
            "leads to it, yet it is not kept" if found else "does not lead to it, yet it is kept"
        )
        return [f"block {block_id}: the index {leads} as cached"]
    if free and block.quarantined:
        return [f"block {block_id} is quarantined, yet on the free list"]
    kinds = Counter(owner.kind for owner in held)
    problems = []
    for label, counted, kind in (
        ("references", block.ref_count, OwnerKind.REQUEST),
        ("pins", block.num_pins, OwnerKind.READER),
        ("transfers", block.num_transfers, OwnerKind.WRITER),
    ):
        if counted != kinds[kind]:
            problems.append(
                f"block {block_id}: the pool counts {counted} {label}, its owners are {kinds[kind]}"
            )
    return problems


def index_owners(pool: BlockPool) -> Iterator[Owner]:
    """The prefix index as an owner of every block that it leads to."""
    for block_id in pool.index if pool.index is not None else ():
        yield Owner(OwnerKind.INDEX, block_id, "")


def _counts(block_id: int, pool: BlockPool) -> str:
    block = pool.blocks[block_id]
    return (
        f"{block.ref_count} references, {block.num_pins} pins, {block.num_transfers} transfers "
        "counted"
    )


def _name(owner: Owner) -> str:
    peer = f" for {owner.peer}" if owner.peer else ""
    if owner.kind is OwnerKind.INDEX:
        return "the prefix index"
    return f"{owner.kind.value} {owner.request_id or '?'}#{owner.attempt}{peer}"


@dataclass(frozen=True, slots=True)
class HostAudit:
    """The host tier by owner, in blocks, and what is wrong with it.

    A content with several owners counts once, under the first by name; ``num_cached`` have none.
    Owned, cached and free ones are all slots and files.
    """

    owned: dict[str, int]
    num_cached: int
    num_free: int
    problems: tuple[str, ...]

    @property
    def consistent(self) -> bool:
        """Whether the tier agrees with the owners."""
        return not self.problems


def audit_host(tier: HostTier, owners: Iterable[Hashable]) -> HostAudit:
    """Hold the host tier against those that may have something there: the living sequences."""
    living = frozenset(owners)
    owned: Counter[str] = Counter()
    num_cached = 0
    problems: list[str] = []
    places = Counter(("slot", slot) for slot in tier.free_slots)
    places.update(("file", file) for file in tier.free_files)
    for entry in tier:
        name = _content_name(entry.key)
        if entry.slot is not None:
            places["slot", entry.slot] += 1
        if entry.file is not None:
            places["file", entry.file] += 1
        gone = sorted(str(owner) for owner in entry.owners - living)
        if gone:
            problems.append(f"host {name} leaked: kept for {', '.join(gone)}, which is gone")
        if entry.owners:
            owned[min(str(owner) for owner in entry.owners)] += 1
        elif isinstance(entry.key, TailKey) or not tier.caching:
            problems.append(f"host {name} leaked: nobody holds it, and nobody else can use it")
        else:
            num_cached += 1
    expected = [("slot", slot) for slot in range(tier.num_slots)]
    expected += [("file", file) for file in range(tier.num_files)]
    for kind, number in expected:
        found = places.pop((kind, number), 0)
        if found != 1:
            problems.append(f"host {kind} {number} is in {found} places, wanted one")
    problems.extend(f"host {kind} {number} does not exist" for kind, number in places)
    num_free = len(tier.free_slots) + len(tier.free_files)
    return HostAudit(dict(owned), num_cached, num_free, tuple(problems))


def _content_name(key: HostKey) -> str:
    if isinstance(key, TailKey):
        return f"block {key.block_index} of {key.owner}"
    return f"block {key.hex()[:12]}"
