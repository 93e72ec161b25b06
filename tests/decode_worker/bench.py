"""A decode worker whose router, and whose prefill worker's words and blocks, a test plays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.decode_worker.leg import DecodeLeg
from kvferry.decode_worker.role import DecodeRole
from kvferry.engine.request import Attempt, RequestSpec
from kvferry.engine.scheduler import SchedulerConfig
from kvferry.kv_cache.audit import BlockClass, PoolAudit
from kvferry.kv_transfer.connector import BlockRef
from kvferry.kv_transfer.local import LocalFabric
from kvferry.worker import messages as m
from kvferry.worker.messages import AnnouncedBlock, Body, NodeRef, Role
from tests.fakes import ATTEMPT, FakeClock, stub_output, stub_spec, stub_value
from tests.worker.making import BLOCK, ROUTER, MadeWorker, Sender, attach, make_worker, membership

DECODE, SOURCE, OTHER = NodeRef("decode-0", 5), NodeRef("prefill-0", 6), NodeRef("prefill-1", 7)


@dataclass
class DecodeBench:
    """See the module. Blocks hold four positions; reads end one block per step by default."""

    num_blocks: int = 16
    blocks_per_poll: int | None = 1
    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(8, 32, 8, 0.0))

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        fabric = LocalFabric()
        self.made: MadeWorker = make_worker(
            fabric,
            DECODE,
            (Role.DECODE,),
            clock=self.clock,
            num_blocks=self.num_blocks,
            blocks_per_poll=self.blocks_per_poll,
            scheduler=self.scheduler,
        )
        self.role = DecodeRole(self.made.worker)
        attach(self.made, self.role)
        self.source = make_worker(fabric, SOURCE, (Role.PREFILL,))
        self.other = make_worker(fabric, OTHER, (Role.PREFILL,))
        self.router = Sender(self.made.worker, ROUTER)
        self.prefill = Sender(self.made.worker, SOURCE)
        self.tell(membership(self.made.member, self.source.member, self.other.member))
        self.made.sent()

    # --- what the test says -----------------------------------------------------------------

    def tell(self, body: Body, heard: int | None = None) -> None:
        """The router's message arrives."""
        self.router.send(body, self.clock.now, heard)

    def reserve(
        self,
        name: str = "r",
        length: int = 10,
        max_tokens: int = 5,
        *,
        attempt: Attempt = ATTEMPT,
        suffix: Sequence[int] = (),
        here: bool = False,
    ) -> RequestSpec:
        """The router asks for blocks."""
        spec = stub_spec(name, range(length), max_tokens, suffix)
        self.tell(m.Reserve(spec, attempt, here))
        return spec

    def announced(self, spec: RequestSpec, index: int) -> AnnouncedBlock:
        """Block ``index`` of the prompt, written into the source's pool and described."""
        prompt = spec.kv_prompt()
        start = index * BLOCK
        tokens = prompt[start : start + BLOCK]
        slots = self.source.memory.blocks[index].view("<i8")
        slots[: len(tokens)] = [stub_value(t, start + i) for i, t in enumerate(tokens)]
        chain = self.made.worker.engine.hash_chain(spec)
        generation = int(self.source.memory.generations[index])
        return AnnouncedBlock(
            start,
            len(tokens),
            BlockRef(SOURCE.epoch, index, generation),
            chain.at(index, prompt),
            self.source.connector.digest(index),
        )

    def announce(
        self,
        spec: RequestSpec,
        *indexes: int,
        hand_off: bool = False,
        attempt: Attempt = ATTEMPT,
        blocks: Sequence[AnnouncedBlock] | None = None,
    ) -> None:
        """The prefill worker announces these blocks of the prompt, perhaps with token 1."""
        if blocks is None:
            blocks = [self.announced(spec, index) for index in indexes]
        body = m.Announce(
            spec.request_id, attempt, tuple(blocks), self.hand_off(spec) if hand_off else None
        )
        self.prefill.send(body, self.clock.now)

    def hand_off(self, spec: RequestSpec) -> m.HandOff:
        """Token 1 as the stub model samples it."""
        prompt = spec.kv_prompt()
        return m.HandOff(tuple(stub_output(prompt, 1)), len(prompt))

    def pulled(self, name: str = "r", length: int = 10, max_tokens: int = 5) -> RequestSpec:
        """A reservation with all its blocks read and the hand-off there: it decodes."""
        spec = self.reserve(name, length, max_tokens)
        self.announce(spec, *range(-(-length // BLOCK)), hand_off=True)
        while self.leg(name).state is m.LegState.RESERVED:
            self.step()
        return spec

    # --- what happens -----------------------------------------------------------------------

    def step(self, times: int = 1) -> None:
        """Some engine steps, no time between them."""
        for _ in range(times):
            self.made.worker.tick(self.clock.now)
            self.made.worker.step()
            self.check()

    def wait(self, seconds: float) -> None:
        """Time passes; the router is heard; then one tick."""
        self.clock.now += seconds
        self.tell(m.RouterHeartbeat())
        self.made.worker.tick(self.clock.now)
        self.check()

    def check(self) -> PoolAudit:
        """The pool agrees with its owners."""
        found = self.made.worker.audit(self.clock.now)
        assert found.problems == ()
        return found

    def leg(self, name: str = "r") -> DecodeLeg:
        """The one leg of a request."""
        (leg,) = [leg for (r, _), leg in self.role.legs.items() if r == name]
        return leg

    def sent(self, kind: type[Body] | None = None) -> list[Body]:
        """Bodies sent since the last call; those of other kinds are dropped."""
        return [envelope.body for envelope in self.made.sent(kind)]

    def tokens(self) -> list[m.TokenEvent]:
        """Token events sent since the last call."""
        bodies = self.sent(m.TokenEvents)
        return [e for body in bodies if isinstance(body, m.TokenEvents) for e in body.events]

    def is_empty(self) -> bool:
        """Nothing is held for anybody."""
        found = self.check()
        return (
            not self.role.legs
            and not len(self.made.worker.reads)
            and not self.made.worker.engine.scheduler.sequences
            and found.counts[BlockClass.FREE] == self.num_blocks
        )
