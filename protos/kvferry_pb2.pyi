from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "sampling", "cache_salt", "priority", "tenant", "adapter", "resume_grace_s", "first_output_index", "echo_prompt_token_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RESUME_GRACE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    ECHO_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: ChatInput
    sampling: SamplingParams
    cache_salt: str
    priority: int
    tenant: str
    adapter: str
    resume_grace_s: float
    first_output_index: int
    echo_prompt_token_ids: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., adapter: _Optional[str] = ..., resume_grace_s: _Optional[float] = ..., first_output_index: _Optional[int] = ..., echo_prompt_token_ids: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages", "tools", "continue_final_message", "add_generation_prompt", "template_args")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedScalarFieldContainer[str]
    continue_final_message: bool
    add_generation_prompt: bool
    template_args: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[str]] = ..., continue_final_message: _Optional[bool] = ..., add_generation_prompt: _Optional[bool] = ..., template_args: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    tool_calls: _containers.RepeatedScalarFieldContainer[str]
    tool_call_id: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., tool_calls: _Optional[_Iterable[str]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "logprobs", "logit_bias", "skip_special_tokens", "bad_words", "prompt_logprobs", "num_beams", "length_penalty", "early_stopping")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_BEAMS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    n: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    skip_special_tokens: bool
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    prompt_logprobs: int
    num_beams: int
    length_penalty: float
    early_stopping: str
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop_str_in_output: _Optional[bool] = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., skip_special_tokens: _Optional[bool] = ..., bad_words: _Optional[_Iterable[str]] = ..., prompt_logprobs: _Optional[int] = ..., num_beams: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[str] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("request_id", "resume_token", "received", "request")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    resume_token: str
    received: _containers.RepeatedCompositeFieldContainer[Received]
    request: GenerateRequest
    def __init__(self, request_id: _Optional[str] = ..., resume_token: _Optional[str] = ..., received: _Optional[_Iterable[_Union[Received, _Mapping]]] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("branch", "token_ids")
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    branch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, branch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatInput
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "accepted", "delta", "finished")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    accepted: Accepted
    delta: Delta
    finished: Finished
    def __init__(self, request_id: _Optional[str] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("prompt_tokens", "predicted_ttft_s", "resume_token", "prompt_token_ids")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    predicted_ttft_s: float
    resume_token: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_tokens: _Optional[int] = ..., predicted_ttft_s: _Optional[float] = ..., resume_token: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("branch", "index", "token_ids", "text", "logprobs", "prompt_logprobs")
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    branch: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, branch: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    class TopEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.ScalarMap[int, float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Mapping[int, float]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("branch", "finish_reason", "stop_reason", "usage", "timing", "transfer", "attempt", "is_last", "prefill_worker", "decode_worker", "num_prefill_chunks", "num_preemptions", "recomputed_prompt_tokens")
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    branch: int
    finish_reason: str
    stop_reason: str
    usage: Usage
    timing: Timing
    transfer: Transfer
    attempt: int
    is_last: bool
    prefill_worker: str
    decode_worker: str
    num_prefill_chunks: int
    num_preemptions: int
    recomputed_prompt_tokens: int
    def __init__(self, branch: _Optional[int] = ..., finish_reason: _Optional[str] = ..., stop_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timing: _Optional[_Union[Timing, _Mapping]] = ..., transfer: _Optional[_Union[Transfer, _Mapping]] = ..., attempt: _Optional[int] = ..., is_last: _Optional[bool] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., num_prefill_chunks: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., recomputed_prompt_tokens: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "delivery_s", "ttft_s", "handoff_s", "decode_wait_s", "first_step_s", "ttst_s", "tpot_s", "e2e_s", "itl_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_S_FIELD_NUMBER: _ClassVar[int]
    TTST_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    E2E_S_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    delivery_s: float
    ttft_s: float
    handoff_s: float
    decode_wait_s: float
    first_step_s: float
    ttst_s: float
    tpot_s: float
    e2e_s: float
    itl_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., delivery_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., handoff_s: _Optional[float] = ..., decode_wait_s: _Optional[float] = ..., first_step_s: _Optional[float] = ..., ttst_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., e2e_s: _Optional[float] = ..., itl_s: _Optional[_Iterable[float]] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("connector", "blocks_moved", "bytes_moved", "blocks_reused", "reads_failed", "blocks_before_last_chunk", "transfer_s", "transfer_exposed_s", "first_use_setup_s")
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MOVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REUSED_FIELD_NUMBER: _ClassVar[int]
    READS_FAILED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_BEFORE_LAST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_USE_SETUP_S_FIELD_NUMBER: _ClassVar[int]
    connector: str
    blocks_moved: int
    bytes_moved: int
    blocks_reused: int
    reads_failed: int
    blocks_before_last_chunk: int
    transfer_s: float
    transfer_exposed_s: float
    first_use_setup_s: float
    def __init__(self, connector: _Optional[str] = ..., blocks_moved: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., blocks_reused: _Optional[int] = ..., reads_failed: _Optional[int] = ..., blocks_before_last_chunk: _Optional[int] = ..., transfer_s: _Optional[float] = ..., transfer_exposed_s: _Optional[float] = ..., first_use_setup_s: _Optional[float] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("include_decisions",)
    INCLUDE_DECISIONS_FIELD_NUMBER: _ClassVar[int]
    include_decisions: bool
    def __init__(self, include_decisions: _Optional[bool] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("ready", "not_ready_reasons", "model", "endpoints", "routers", "workers", "counters", "decisions", "version", "machine")
    READY_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_REASONS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    not_ready_reasons: _containers.RepeatedScalarFieldContainer[str]
    model: Model
    endpoints: Endpoints
    routers: _containers.RepeatedCompositeFieldContainer[Router]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    counters: Counters
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    version: str
    machine: Machine
    def __init__(self, ready: _Optional[bool] = ..., not_ready_reasons: _Optional[_Iterable[str]] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., endpoints: _Optional[_Union[Endpoints, _Mapping]] = ..., routers: _Optional[_Iterable[_Union[Router, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., version: _Optional[str] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "revision", "architecture", "dtype", "kv_dtype", "block_size", "block_bytes", "max_model_len", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "weight_bytes", "num_layer_parameters", "num_head_parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYER_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NUM_HEAD_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    architecture: str
    dtype: str
    kv_dtype: str
    block_size: int
    block_bytes: int
    max_model_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    weight_bytes: int
    num_layer_parameters: int
    num_head_parameters: int
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., max_model_len: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., vocab_size: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., num_layer_parameters: _Optional[int] = ..., num_head_parameters: _Optional[int] = ...) -> None: ...

class Machine(_message.Message):
    __slots__ = ("cpu", "isa", "cores", "memory_bytes", "os", "python", "torch")
    CPU_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    OS_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    TORCH_FIELD_NUMBER: _ClassVar[int]
    cpu: str
    isa: str
    cores: int
    memory_bytes: int
    os: str
    python: str
    torch: str
    def __init__(self, cpu: _Optional[str] = ..., isa: _Optional[str] = ..., cores: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., os: _Optional[str] = ..., python: _Optional[str] = ..., torch: _Optional[str] = ...) -> None: ...

class Endpoints(_message.Message):
    __slots__ = ("grpc", "http", "metrics")
    GRPC_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    grpc: _containers.RepeatedScalarFieldContainer[str]
    http: _containers.RepeatedScalarFieldContainer[str]
    metrics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, grpc: _Optional[_Iterable[str]] = ..., http: _Optional[_Iterable[str]] = ..., metrics: _Optional[_Iterable[str]] = ...) -> None: ...

class Router(_message.Message):
    __slots__ = ("router_id", "epoch", "pid", "num_in_flight", "host")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    epoch: int
    pid: int
    num_in_flight: int
    host: str
    def __init__(self, router_id: _Optional[str] = ..., epoch: _Optional[int] = ..., pid: _Optional[int] = ..., num_in_flight: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "role", "state", "epoch", "pid", "host", "node_id", "address", "threads", "kernels", "connectors", "placement", "cores")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    CONNECTORS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    state: str
    epoch: int
    pid: int
    host: str
    node_id: str
    address: str
    threads: int
    kernels: Kernels
    connectors: _containers.RepeatedScalarFieldContainer[str]
    placement: str
    cores: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., node_id: _Optional[str] = ..., address: _Optional[str] = ..., threads: _Optional[int] = ..., kernels: _Optional[_Union[Kernels, _Mapping]] = ..., connectors: _Optional[_Iterable[str]] = ..., placement: _Optional[str] = ..., cores: _Optional[_Iterable[int]] = ...) -> None: ...

class Kernels(_message.Message):
    __slots__ = ("implementation", "isa")
    IMPLEMENTATION_FIELD_NUMBER: _ClassVar[int]
    ISA_FIELD_NUMBER: _ClassVar[int]
    implementation: str
    isa: str
    def __init__(self, implementation: _Optional[str] = ..., isa: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "heartbeat_age_s", "num_running", "num_waiting", "num_swapped", "queued_tokens", "kv", "prefill_tokens_per_s", "decode_step_s", "peers", "num_restarts", "cache")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    heartbeat_age_s: float
    num_running: int
    num_waiting: int
    num_swapped: int
    queued_tokens: int
    kv: KVUsage
    prefill_tokens_per_s: float
    decode_step_s: float
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    num_restarts: int
    cache: CacheCounters
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ..., heartbeat_age_s: _Optional[float] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_swapped: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., kv: _Optional[_Union[KVUsage, _Mapping]] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., num_restarts: _Optional[int] = ..., cache: _Optional[_Union[CacheCounters, _Mapping]] = ...) -> None: ...

class CacheCounters(_message.Message):
    __slots__ = ("queried_tokens", "hit_tokens_local", "hit_tokens_moved", "hit_tokens_host", "num_evictions", "num_cow_copies", "preemptions_recompute", "preemptions_offload", "recomputed_tokens_preemption", "recomputed_tokens_recovery", "mean_block_lifetime_s", "mean_block_idle_s")
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_MOVED_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_HOST_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_COW_COPIES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_OFFLOAD_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_RECOVERY_FIELD_NUMBER: _ClassVar[int]
    MEAN_BLOCK_LIFETIME_S_FIELD_NUMBER: _ClassVar[int]
    MEAN_BLOCK_IDLE_S_FIELD_NUMBER: _ClassVar[int]
    queried_tokens: int
    hit_tokens_local: int
    hit_tokens_moved: int
    hit_tokens_host: int
    num_evictions: int
    num_cow_copies: int
    preemptions_recompute: int
    preemptions_offload: int
    recomputed_tokens_preemption: int
    recomputed_tokens_recovery: int
    mean_block_lifetime_s: float
    mean_block_idle_s: float
    def __init__(self, queried_tokens: _Optional[int] = ..., hit_tokens_local: _Optional[int] = ..., hit_tokens_moved: _Optional[int] = ..., hit_tokens_host: _Optional[int] = ..., num_evictions: _Optional[int] = ..., num_cow_copies: _Optional[int] = ..., preemptions_recompute: _Optional[int] = ..., preemptions_offload: _Optional[int] = ..., recomputed_tokens_preemption: _Optional[int] = ..., recomputed_tokens_recovery: _Optional[int] = ..., mean_block_lifetime_s: _Optional[float] = ..., mean_block_idle_s: _Optional[float] = ...) -> None: ...

class KVUsage(_message.Message):
    __slots__ = ("num_total", "num_free", "num_cached", "usage", "block_size")
    NUM_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    num_total: int
    num_free: int
    num_cached: int
    usage: float
    block_size: int
    def __init__(self, num_total: _Optional[int] = ..., num_free: _Optional[int] = ..., num_cached: _Optional[int] = ..., usage: _Optional[float] = ..., block_size: _Optional[int] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("worker_id", "epoch", "connector", "state", "bandwidth_bytes_per_s", "reason")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    connector: str
    state: str
    bandwidth_bytes_per_s: float
    reason: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., connector: _Optional[str] = ..., state: _Optional[str] = ..., bandwidth_bytes_per_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("accepted", "finished_stop", "finished_length", "aborted", "failed", "rejected", "preempted", "recovered", "stale_refused")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STOP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_FIELD_NUMBER: _ClassVar[int]
    STALE_REFUSED_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    finished_stop: int
    finished_length: int
    aborted: int
    failed: int
    rejected: int
    preempted: int
    recovered: int
    stale_refused: int
    def __init__(self, accepted: _Optional[int] = ..., finished_stop: _Optional[int] = ..., finished_length: _Optional[int] = ..., aborted: _Optional[int] = ..., failed: _Optional[int] = ..., rejected: _Optional[int] = ..., preempted: _Optional[int] = ..., recovered: _Optional[int] = ..., stale_refused: _Optional[int] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("request_id", "policy", "prefill_worker", "decode_worker", "predicted_ttft_s", "actual_ttft_s", "cached_tokens", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    policy: str
    prefill_worker: str
    decode_worker: str
    predicted_ttft_s: float
    actual_ttft_s: float
    cached_tokens: int
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., policy: _Optional[str] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., predicted_ttft_s: _Optional[float] = ..., actual_ttft_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("worker_id", "include_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    include_blocks: bool
    def __init__(self, worker_id: _Optional[str] = ..., include_blocks: _Optional[bool] = ...) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    def __init__(self, pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("worker_id", "role", "epoch", "block_size", "block_bytes", "num_total", "num_free", "num_cached", "num_pinned", "num_in_transfer", "num_referenced", "num_quarantined", "consistent", "problems", "blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    NUM_REFERENCED_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    CONSISTENT_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    epoch: int
    block_size: int
    block_bytes: int
    num_total: int
    num_free: int
    num_cached: int
    num_pinned: int
    num_in_transfer: int
    num_referenced: int
    num_quarantined: int
    consistent: bool
    problems: _containers.RepeatedScalarFieldContainer[str]
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., block_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_total: _Optional[int] = ..., num_free: _Optional[int] = ..., num_cached: _Optional[int] = ..., num_pinned: _Optional[int] = ..., num_in_transfer: _Optional[int] = ..., num_referenced: _Optional[int] = ..., num_quarantined: _Optional[int] = ..., consistent: _Optional[bool] = ..., problems: _Optional[_Iterable[str]] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("block_id", "generation", "block_class", "ref_count", "num_tokens", "hash", "owners")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_CLASS_FIELD_NUMBER: _ClassVar[int]
    REF_COUNT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    generation: int
    block_class: str
    ref_count: int
    num_tokens: int
    hash: str
    owners: _containers.RepeatedCompositeFieldContainer[Owner]
    def __init__(self, block_id: _Optional[int] = ..., generation: _Optional[int] = ..., block_class: _Optional[str] = ..., ref_count: _Optional[int] = ..., num_tokens: _Optional[int] = ..., hash: _Optional[str] = ..., owners: _Optional[_Iterable[_Union[Owner, _Mapping]]] = ...) -> None: ...

class Owner(_message.Message):
    __slots__ = ("kind", "request_id", "attempt", "peer", "lease_remaining_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    LEASE_REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    request_id: str
    attempt: int
    peer: str
    lease_remaining_s: float
    def __init__(self, kind: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., peer: _Optional[str] = ..., lease_remaining_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id", "timeout_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    timeout_s: float
    def __init__(self, worker_id: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode", "colocated", "timeout_s")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    colocated: int
    timeout_s: float
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., colocated: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("prefill", "decode", "colocated")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    COLOCATED_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    colocated: int
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., colocated: _Optional[int] = ...) -> None: ...
