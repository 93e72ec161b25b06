"""The sections of the configuration file, their defaults and ranges, as frozen models.

Owns every default that a user may set, once; those of who may do what are in ``config_access``, and
how values are written in ``config_types``. Does not know where values come from: ``cluster.config``
reads files and overrides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvferry.cluster.config_access import AuthConfig, TenantConfigs, TlsConfig
from kvferry.cluster.config_types import (
    BlockSize,
    Count,
    Duration,
    HostPort,
    Probability,
    RayAddress,
    Resources,
    RoleBlockSize,
    Section,
    Size,
    Text,
)

OWN_RAY_HAS = frozenset({"CPU", "GPU", "memory"})


class ModelConfig(Section):
    """Which model is served. ``path`` (a folder or GGUF file), where given, stands before ``name``;
    ``revision`` is a branch, tag or commit of a name ``ORG/NAME`` of the Hugging Face Hub.

    ``dtype`` auto: float32 on CPU, bfloat16 on GPUs; int8 is of matrices, activations are float32.
    ``max_model_len`` in tokens; None: what the model states.
    """

    name: Text = "smollm2-135m-instruct"
    path: Text | None = None
    revision: Text | None = None
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    max_model_len: Count | None = None
    served_name: Text | None = None


class HostTierConfig(Section):
    """Where each worker keeps KV outside its pool: ``memory``, and beside it ``disk_size`` bytes of
    the folder ``disk_path``. None: nowhere.
    """

    memory: Annotated[Size, Field(ge=1)] | None = None
    disk_path: Text | None = None
    disk_size: Annotated[Size, Field(ge=1)] | None = None


class CacheConfig(Section):
    """The KV pool of each worker: its blocks, or the memory to divide into blocks.

    With neither ``num_blocks`` nor ``memory`` the pool is sized from the memory that is free.
    ``prefix_caching`` keeps the KV of ended requests for others that begin alike; they are compared
    every ``prefix_match_unit`` tokens, a divisor of every block size and by default the greatest.
    ``block_size`` auto is chosen from the model and the connector (``worker.block_sizing``).
    ``kv_dtype`` auto is that of activations.
    """

    block_size: BlockSize = 16
    prefix_caching: bool = True
    prefix_match_unit: Count | None = None
    num_blocks: Count | None = None
    memory: Annotated[Size, Field(ge=1)] | None = None
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"] = "auto"
    host_tier: HostTierConfig = HostTierConfig()


class SchedulerConfig(Section):
    """Budgets of one engine step.

    ``chunk_tokens`` is the most that one request may prefill in a step; ``watermark`` the share of
    the pool that admission leaves free for growth. Where ``policy`` is ``priority``, requests wait
    in order of theirs, and ``ageing`` of waiting is worth one level of it.
    """

    max_num_seqs: Count = 32
    max_num_batched_tokens: Count = 288
    chunk_tokens: Count = 256
    policy: Literal["fcfs", "priority"] = "fcfs"
    ageing: Annotated[Duration, Field(ge=0.001, le=86400)] = 10.0
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01


class RoleConfig(Section):
    """The workers of one role. None: ``replicas`` see ``Config.replicas``; ``threads`` a share of
    the cores; ``block_size`` and ``num_blocks`` as in ``cache``. ``gpus``: of a GPU, each worker.

    ``resources`` are Ray's that each worker reserves, by name; ``GPU`` among them stands before
    ``gpus``. In a cluster that is joined a worker also reserves a CPU for each of its threads,
    unless ``CPU`` is among them.
    """

    replicas: Annotated[int, Field(ge=0, le=1024)] | None = None
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    resources: Resources = Field(default_factory=dict)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: Annotated[float, Field(gt=0, le=1)] = 1.0
    block_size: RoleBlockSize = None
    num_blocks: Count | None = None


class FaultsConfig(Section):
    """Faults to inject into transfers, for trying out a deployment.

    All but ``seed`` and ``delay`` are probabilities; ``kv_transfer.faults`` says of what.
    """

    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    delay: Duration = 0.0
    drop: Probability = 0.0
    duplicate: Probability = 0.0
    reorder: Probability = 0.0
    corrupt: Probability = 0.0
    stall: Probability = 0.0
    die: Probability = 0.0


class TransferConfig(Section):
    """How blocks move and how workers and router say what they still want.

    ``stall_limit`` bounds a lease whose reader makes no progress, and a worker's step;
    ``read_timeout`` a read that gives no block; ``max_in_flight_blocks`` is per peer, and
    ``staging_blocks`` of each GPU worker and direction; ``checksum`` auto verifies every block.
    ``host``: where workers and router listen for each other; auto is loopback with a Ray of one's
    own, and the node's address in one that is joined.
    """

    connector: Literal["auto", "shm", "tcp"] = "auto"
    checksum: Literal["auto", "always", "never"] = "auto"
    list_period: Annotated[Duration, Field(ge=0.01, le=60)] = 1.0
    stall_limit: Annotated[Duration, Field(ge=0.1, le=3600)] = 30.0
    read_timeout: Annotated[Duration, Field(ge=0.1, le=3600)] = 10.0
    heartbeat: Annotated[Duration, Field(ge=0.01, le=60)] = 0.5
    max_in_flight_blocks: Count = 64
    staging_blocks: Count = 128
    host: Literal["auto", "loopback", "node"] = "auto"
    faults: FaultsConfig = FaultsConfig()


class RouterConfig(Section):
    """The router's queue and its patience.

    ``queue_limit`` in requests; ``prefill_window`` in tokens that a prefill worker may hold beyond
    what it runs; ``worker_wait`` is how long requests wait for a worker of a missing role.
    """

    policy: Literal["least_loaded"] = "least_loaded"
    queue_limit: Count = 1024
    prefill_window: Count = 2048
    worker_wait: Annotated[Duration, Field(le=3600)] = 30.0
    heartbeat_timeout: Annotated[Duration, Field(ge=0.02, le=600)] = 1.5
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3


class ServerConfig(Section):
    """The addresses that clients reach, and what they may do there.

    A connection that has been idle for ``keepalive`` is pinged, and dropped if it does not answer
    for ``keepalive_timeout``; a client that takes nothing of its stream for ``slow_client_limit``
    has its request cancelled. ``max_message_bytes`` bounds what is received. No ``http``: no such
    door; likewise ``metrics``, where Prometheus finds its page. ``tls`` and ``auth`` are of every
    door.
    """

    grpc: HostPort = "127.0.0.1:50051"
    http: HostPort | None = None
    metrics: HostPort | None = None
    max_message_bytes: Annotated[Size, Field(ge=1024, lt=2**31)] = 4 * 2**20
    keepalive: Annotated[Duration, Field(ge=1, le=86400)] = 30.0
    keepalive_timeout: Annotated[Duration, Field(ge=1, le=86400)] = 10.0
    slow_client_limit: Annotated[Duration, Field(ge=0.1, le=86400)] = 30.0
    tls: TlsConfig = TlsConfig()
    auth: AuthConfig = AuthConfig()


class RayConfig(Section):
    """The Ray cluster to join; with no ``address`` a local one is started.

    Address auto is the one that runs on this host. What follows is of one that is joined: how long
    workers wait for a place there, and whether those of a host keep to cores of their own.
    """

    address: RayAddress | None = None
    namespace: Text = "kvferry"
    object_store_memory: Annotated[Size, Field(ge=75 * 2**20)] = 100 * 2**20
    placement_wait: Annotated[Duration, Field(le=86400)] = 600.0
    pin_cores: bool = True


class LoggingConfig(Section):
    """What the processes log, to standard error: lines of text, or of JSON."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    format: Literal["text", "json"] = "text"


class DebugConfig(Section):
    """Checks that cost time, and what computes.

    ``kernels`` auto takes the compiled ones where they were built, and triton on a GPU; ``isa``
    auto the widest instruction set that the processor has.
    """

    audit_every_step: bool = False
    kernels: Literal["auto", "reference", "cpu", "triton"] = "auto"
    isa: Literal[
        "auto", "amx", "avx512_bf16", "avx512", "avx2_vnni", "avx2", "baseline", "neon"
    ] = "auto"


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many workers of each role to start."""

    prefill: int
    decode: int
    colocated: int


class Config(Section):
    """The whole configuration; every section may be left out."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()
    colocated: RoleConfig = RoleConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    server: ServerConfig = ServerConfig()
    tenants: TenantConfigs = Field(default_factory=dict)
    ray: RayConfig = RayConfig()
    logging: LoggingConfig = LoggingConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def is_locked(self) -> bool:
        """Whether clients need something to get in, or to see whom they talk to."""
        server = self.server
        return bool(server.tls.cert or server.auth.tokens_file or self.tenants)

    def replicas(self) -> Replicas:
        """Workers to start: 1 prefill and 1 decode, unless the counts say otherwise."""
        colocated = self.colocated.replicas or 0
        unsaid = 0 if colocated else 1
        prefill, decode = self.prefill.replicas, self.decode.replicas
        return Replicas(
            prefill=unsaid if prefill is None else prefill,
            decode=unsaid if decode is None else decode,
            colocated=colocated,
        )

    def block_sizes(self) -> dict[str, int | str]:
        """Positions per block as asked for, of each role that has workers."""
        count = self.replicas()
        roles = (
            ("prefill", count.prefill, self.prefill),
            ("decode", count.decode, self.decode),
            ("colocated", count.colocated, self.colocated),
        )
        return {
            name: self.cache.block_size if section.block_size is None else section.block_size
            for name, workers, section in roles
            if workers
        }

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        scheduler, transfer, router = self.scheduler, self.transfer, self.router
        tier = self.cache.host_tier
        count = self.replicas()
        can_serve = count.colocated or (count.prefill and count.decode)
        unit = self.cache.prefix_match_unit or 1
        uneven = {
            role: size
            for role, size in self.block_sizes().items()
            if isinstance(size, int) and size % unit
        }
        roles = (
            ("prefill", self.prefill),
            ("decode", self.decode),
            ("colocated", self.colocated),
        )
        for fits, message in (
            (
                self.model.path is None or self.model.revision is None,
                "model.path and model.revision are both given: a revision is of a model.name of "
                "the Hugging Face Hub",
            ),
            (
                self.cache.num_blocks is None or self.cache.memory is None,
                "cache.num_blocks and cache.memory are both given: keep one",
            ),
            (
                (tier.disk_path is None) == (tier.disk_size is None),
                "cache.host_tier.disk_path and cache.host_tier.disk_size: one is given without the "
                "other",
            ),
            (
                tier.disk_path is None or tier.memory is not None,
                "cache.host_tier.disk_path is given without cache.host_tier.memory: blocks go to "
                "the disk through it",
            ),
            (
                scheduler.max_num_batched_tokens >= scheduler.max_num_seqs,
                f"scheduler.max_num_batched_tokens: got {scheduler.max_num_batched_tokens}, wanted "
                f"at least scheduler.max_num_seqs = {scheduler.max_num_seqs}: each running request "
                "needs one token a step",
            ),
            (
                scheduler.chunk_tokens <= scheduler.max_num_batched_tokens,
                f"scheduler.chunk_tokens: got {scheduler.chunk_tokens}, wanted at most "
                f"scheduler.max_num_batched_tokens = {scheduler.max_num_batched_tokens}",
            ),
            (
                router.heartbeat_timeout >= 2 * transfer.heartbeat,
                f"router.heartbeat_timeout: got {router.heartbeat_timeout:g} s, wanted at least "
                f"two of transfer.heartbeat = {transfer.heartbeat:g} s",
            ),
            (
                transfer.stall_limit >= 2 * transfer.list_period,
                f"transfer.stall_limit: got {transfer.stall_limit:g} s, wanted at least two of "
                f"transfer.list_period = {transfer.list_period:g} s",
            ),
            (
                self.server.http != self.server.grpc or self.server.grpc.endswith(":0"),
                f"server.http: got {self.server.http}, which is server.grpc's: give another",
            ),
            (
                self.debug.kernels in ("auto", "cpu") or self.debug.isa == "auto",
                f"debug.isa: got {self.debug.isa}, but debug.kernels is {self.debug.kernels}: only "
                "the compiled kernels, cpu, have instruction sets",
            ),
            (
                not uneven,
                f"cache.prefix_match_unit: got {unit}, wanted a divisor of every block size ("
                + ", ".join(f"{role} {size}" for role, size in uneven.items())
                + ")",
            ),
            *(
                (
                    self.ray.address is not None or section.resources.keys() <= OWN_RAY_HAS,
                    f"{role}.resources: got {', '.join(section.resources)}; a Ray of one's own has "
                    "CPU, GPU and memory only: join a cluster (ray.address) for others",
                )
                for role, section in roles
            ),
            *(
                (
                    section.device != "cuda" or section.resources.get("GPU", 1.0) > 0,
                    f"{role}.resources.GPU: got 0, but {role}.device is cuda: leave it out",
                )
                for role, section in roles
            ),
            (
                can_serve,
                f"replicas: got {count.prefill} prefill, {count.decode} decode, {count.colocated} "
                "colocated; wanted at least one prefill and one decode, or one colocated",
            ),
        ):
            if not fits:
                raise ValueError(message)
        return self
