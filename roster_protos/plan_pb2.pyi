from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MoveOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOVE_OUTCOME_UNSPECIFIED: _ClassVar[MoveOutcome]
    MOVE_OUTCOME_GRANTED: _ClassVar[MoveOutcome]
    MOVE_OUTCOME_DONE: _ClassVar[MoveOutcome]
    MOVE_OUTCOME_FAILED: _ClassVar[MoveOutcome]

class RowStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_STATUS_UNSPECIFIED: _ClassVar[RowStatus]
    ROW_STATUS_NOT_FINITE: _ClassVar[RowStatus]
    ROW_STATUS_FAILED: _ClassVar[RowStatus]
MOVE_OUTCOME_UNSPECIFIED: MoveOutcome
MOVE_OUTCOME_GRANTED: MoveOutcome
MOVE_OUTCOME_DONE: MoveOutcome
MOVE_OUTCOME_FAILED: MoveOutcome
ROW_STATUS_UNSPECIFIED: RowStatus
ROW_STATUS_NOT_FINITE: RowStatus
ROW_STATUS_FAILED: RowStatus

class ToRunner(_message.Message):
    __slots__ = ("session", "number", "welcome", "plan", "masks", "ping", "snapshot_request", "rejection", "grant", "pull", "revoke", "dismissal")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    DISMISSAL_FIELD_NUMBER: _ClassVar[int]
    session: int
    number: int
    welcome: Welcome
    plan: Plan
    masks: Masks
    ping: Ping
    snapshot_request: SnapshotRequest
    rejection: Rejection
    grant: Grant
    pull: Pull
    revoke: Revoke
    dismissal: Dismissal
    def __init__(self, session: _Optional[int] = ..., number: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., masks: _Optional[_Union[Masks, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., snapshot_request: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ..., dismissal: _Optional[_Union[Dismissal, _Mapping]] = ...) -> None: ...

class ToScheduler(_message.Message):
    __slots__ = ("session", "number", "hello", "result", "event", "snapshot", "pong", "moved")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    session: int
    number: int
    hello: Hello
    result: Result
    event: Event
    snapshot: Snapshot
    pong: Pong
    moved: Moved
    def __init__(self, session: _Optional[int] = ..., number: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., event: _Optional[_Union[Event, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("resume", "term", "term_id", "features", "naming_secret")
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TERM_ID_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    NAMING_SECRET_FIELD_NUMBER: _ClassVar[int]
    resume: bool
    term: int
    term_id: int
    features: _containers.RepeatedScalarFieldContainer[str]
    naming_secret: bytes
    def __init__(self, resume: _Optional[bool] = ..., term: _Optional[int] = ..., term_id: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., naming_secret: _Optional[bytes] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("last_plan", "term", "term_id", "longest_context")
    LAST_PLAN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TERM_ID_FIELD_NUMBER: _ClassVar[int]
    LONGEST_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    last_plan: int
    term: int
    term_id: int
    longest_context: int
    def __init__(self, last_plan: _Optional[int] = ..., term: _Optional[int] = ..., term_id: _Optional[int] = ..., longest_context: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("last_plan",)
    LAST_PLAN_FIELD_NUMBER: _ClassVar[int]
    last_plan: int
    def __init__(self, last_plan: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Grant(_message.Message):
    __slots__ = ("key", "blocks", "reader")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    blocks: bytes
    reader: str
    def __init__(self, key: _Optional[bytes] = ..., blocks: _Optional[bytes] = ..., reader: _Optional[str] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("key", "endpoint", "source", "sources", "targets", "memory")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    endpoint: str
    source: str
    sources: bytes
    targets: bytes
    memory: str
    def __init__(self, key: _Optional[bytes] = ..., endpoint: _Optional[str] = ..., source: _Optional[str] = ..., sources: _Optional[bytes] = ..., targets: _Optional[bytes] = ..., memory: _Optional[str] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class Dismissal(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Moved(_message.Message):
    __slots__ = ("key", "outcome", "reason", "num_bytes", "duration_us", "transport")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    outcome: MoveOutcome
    reason: str
    num_bytes: int
    duration_us: int
    transport: str
    def __init__(self, key: _Optional[bytes] = ..., outcome: _Optional[_Union[MoveOutcome, str]] = ..., reason: _Optional[str] = ..., num_bytes: _Optional[int] = ..., duration_us: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "runner_id", "device", "num_slots", "block_size", "num_blocks", "max_step_tokens", "max_depth", "model", "term", "tile_tokens", "term_id", "features", "fingerprints", "longest_context", "cache_groups", "step_costs", "max_drafts", "drafter", "max_sampled", "num_host_blocks", "block_bytes", "load_block_ns", "offload_block_ns", "naming_secret", "move_endpoint", "kv_format", "move_key", "move_memory", "has_experts", "role", "ranks", "epoch", "lost_rank")
    class FingerprintsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNER_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TILE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TERM_ID_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CACHE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_BLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_BLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    NAMING_SECRET_FIELD_NUMBER: _ClassVar[int]
    MOVE_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    MOVE_KEY_FIELD_NUMBER: _ClassVar[int]
    MOVE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    HAS_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOST_RANK_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    runner_id: str
    device: str
    num_slots: int
    block_size: int
    num_blocks: int
    max_step_tokens: int
    max_depth: int
    model: Model
    term: int
    tile_tokens: int
    term_id: int
    features: _containers.RepeatedScalarFieldContainer[str]
    fingerprints: _containers.ScalarMap[str, str]
    longest_context: int
    cache_groups: int
    step_costs: _containers.RepeatedCompositeFieldContainer[StepCost]
    max_drafts: int
    drafter: str
    max_sampled: int
    num_host_blocks: int
    block_bytes: int
    load_block_ns: int
    offload_block_ns: int
    naming_secret: bytes
    move_endpoint: str
    kv_format: str
    move_key: str
    move_memory: str
    has_experts: bool
    role: str
    ranks: int
    epoch: int
    lost_rank: str
    def __init__(self, protocol_version: _Optional[int] = ..., runner_id: _Optional[str] = ..., device: _Optional[str] = ..., num_slots: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., max_depth: _Optional[int] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., term: _Optional[int] = ..., tile_tokens: _Optional[int] = ..., term_id: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., fingerprints: _Optional[_Mapping[str, str]] = ..., longest_context: _Optional[int] = ..., cache_groups: _Optional[int] = ..., step_costs: _Optional[_Iterable[_Union[StepCost, _Mapping]]] = ..., max_drafts: _Optional[int] = ..., drafter: _Optional[str] = ..., max_sampled: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., load_block_ns: _Optional[int] = ..., offload_block_ns: _Optional[int] = ..., naming_secret: _Optional[bytes] = ..., move_endpoint: _Optional[str] = ..., kv_format: _Optional[str] = ..., move_key: _Optional[str] = ..., move_memory: _Optional[str] = ..., has_experts: _Optional[bool] = ..., role: _Optional[str] = ..., ranks: _Optional[int] = ..., epoch: _Optional[int] = ..., lost_rank: _Optional[str] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("decode_rows", "context", "prompt_positions", "prompt_start", "step_ns", "drafts")
    DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_START_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    decode_rows: int
    context: int
    prompt_positions: int
    prompt_start: int
    step_ns: int
    drafts: int
    def __init__(self, decode_rows: _Optional[int] = ..., context: _Optional[int] = ..., prompt_positions: _Optional[int] = ..., prompt_start: _Optional[int] = ..., step_ns: _Optional[int] = ..., drafts: _Optional[int] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "architecture", "weights_version", "vocab_size", "context_length", "eos_token_ids", "tokenizer", "chat_template", "special_tokens", "prefix_positions", "decoder", "weight_formats", "numerics")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    DECODER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMATS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    weights_version: str
    vocab_size: int
    context_length: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokenizer: bytes
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    prefix_positions: int
    decoder: str
    weight_formats: str
    numerics: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., weights_version: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tokenizer: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., prefix_positions: _Optional[int] = ..., decoder: _Optional[str] = ..., weight_formats: _Optional[str] = ..., numerics: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("releases", "admissions", "append_slots", "append_indexes", "append_blocks", "copy_sources", "copy_targets", "extent_slots", "extent_starts", "extent_counts", "extent_flags", "extent_drafts", "extent_forced", "forced_tokens", "offload_sources", "offload_targets", "offload_counts", "offload_tags", "load_sources", "load_targets", "load_counts", "purged_host_blocks")
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    APPEND_SLOTS_FIELD_NUMBER: _ClassVar[int]
    APPEND_INDEXES_FIELD_NUMBER: _ClassVar[int]
    APPEND_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCES_FIELD_NUMBER: _ClassVar[int]
    COPY_TARGETS_FIELD_NUMBER: _ClassVar[int]
    EXTENT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    EXTENT_STARTS_FIELD_NUMBER: _ClassVar[int]
    EXTENT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FLAGS_FIELD_NUMBER: _ClassVar[int]
    EXTENT_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FORCED_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_SOURCES_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_TARGETS_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_COUNTS_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_TAGS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SOURCES_FIELD_NUMBER: _ClassVar[int]
    LOAD_TARGETS_FIELD_NUMBER: _ClassVar[int]
    LOAD_COUNTS_FIELD_NUMBER: _ClassVar[int]
    PURGED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    releases: bytes
    admissions: _containers.RepeatedCompositeFieldContainer[Admission]
    append_slots: bytes
    append_indexes: bytes
    append_blocks: bytes
    copy_sources: bytes
    copy_targets: bytes
    extent_slots: bytes
    extent_starts: bytes
    extent_counts: bytes
    extent_flags: bytes
    extent_drafts: bytes
    extent_forced: bytes
    forced_tokens: bytes
    offload_sources: bytes
    offload_targets: bytes
    offload_counts: bytes
    offload_tags: bytes
    load_sources: bytes
    load_targets: bytes
    load_counts: bytes
    purged_host_blocks: bytes
    def __init__(self, releases: _Optional[bytes] = ..., admissions: _Optional[_Iterable[_Union[Admission, _Mapping]]] = ..., append_slots: _Optional[bytes] = ..., append_indexes: _Optional[bytes] = ..., append_blocks: _Optional[bytes] = ..., copy_sources: _Optional[bytes] = ..., copy_targets: _Optional[bytes] = ..., extent_slots: _Optional[bytes] = ..., extent_starts: _Optional[bytes] = ..., extent_counts: _Optional[bytes] = ..., extent_flags: _Optional[bytes] = ..., extent_drafts: _Optional[bytes] = ..., extent_forced: _Optional[bytes] = ..., forced_tokens: _Optional[bytes] = ..., offload_sources: _Optional[bytes] = ..., offload_targets: _Optional[bytes] = ..., offload_counts: _Optional[bytes] = ..., offload_tags: _Optional[bytes] = ..., load_sources: _Optional[bytes] = ..., load_targets: _Optional[bytes] = ..., load_counts: _Optional[bytes] = ..., purged_host_blocks: _Optional[bytes] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("slot", "sequence_id", "tokens", "prompt_len", "num_computed", "seed", "sample_index", "sampling", "blocks", "context")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    sequence_id: int
    tokens: bytes
    prompt_len: int
    num_computed: int
    seed: int
    sample_index: int
    sampling: Sampling
    blocks: bytes
    context: bytes
    def __init__(self, slot: _Optional[int] = ..., sequence_id: _Optional[int] = ..., tokens: _Optional[bytes] = ..., prompt_len: _Optional[int] = ..., num_computed: _Optional[int] = ..., seed: _Optional[int] = ..., sample_index: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., blocks: _Optional[bytes] = ..., context: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_ids", "bias_values", "min_tokens", "stop_ids", "logprobs", "prompt_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_ids: bytes
    bias_values: bytes
    min_tokens: int
    stop_ids: bytes
    logprobs: int
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_ids: _Optional[bytes] = ..., bias_values: _Optional[bytes] = ..., min_tokens: _Optional[int] = ..., stop_ids: _Optional[bytes] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Masks(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[RowMask]
    def __init__(self, rows: _Optional[_Iterable[_Union[RowMask, _Mapping]]] = ...) -> None: ...

class RowMask(_message.Message):
    __slots__ = ("row", "bits")
    ROW_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    row: int
    bits: bytes
    def __init__(self, row: _Optional[int] = ..., bits: _Optional[bytes] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("statuses", "token_counts", "tokens", "logprobs", "prompt_logprobs", "timings", "drafted", "offloads_done", "offloads_us", "loads_done", "loads_us")
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    OFFLOADS_DONE_FIELD_NUMBER: _ClassVar[int]
    OFFLOADS_US_FIELD_NUMBER: _ClassVar[int]
    LOADS_DONE_FIELD_NUMBER: _ClassVar[int]
    LOADS_US_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    token_counts: bytes
    tokens: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    timings: Timings
    drafted: bytes
    offloads_done: bytes
    offloads_us: bytes
    loads_done: bytes
    loads_us: bytes
    def __init__(self, statuses: _Optional[bytes] = ..., token_counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., drafted: _Optional[bytes] = ..., offloads_done: _Optional[bytes] = ..., offloads_us: _Optional[bytes] = ..., loads_done: _Optional[bytes] = ..., loads_us: _Optional[bytes] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("row", "first_position", "values", "top", "top_ids", "top_values")
    ROW_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_VALUES_FIELD_NUMBER: _ClassVar[int]
    row: int
    first_position: int
    values: bytes
    top: int
    top_ids: bytes
    top_values: bytes
    def __init__(self, row: _Optional[int] = ..., first_position: _Optional[int] = ..., values: _Optional[bytes] = ..., top: _Optional[int] = ..., top_ids: _Optional[bytes] = ..., top_values: _Optional[bytes] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("idle_ns", "prepare_ns", "forward_ns", "sample_ns", "early_ns")
    IDLE_NS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_NS_FIELD_NUMBER: _ClassVar[int]
    EARLY_NS_FIELD_NUMBER: _ClassVar[int]
    idle_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    early_ns: int
    def __init__(self, idle_ns: _Optional[int] = ..., prepare_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., sample_ns: _Optional[int] = ..., early_ns: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("resend_from", "fault", "draining", "fenced", "fenced_id")
    RESEND_FROM_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    FENCED_ID_FIELD_NUMBER: _ClassVar[int]
    resend_from: int
    fault: str
    draining: bool
    fenced: int
    fenced_id: int
    def __init__(self, resend_from: _Optional[int] = ..., fault: _Optional[str] = ..., draining: _Optional[bool] = ..., fenced: _Optional[int] = ..., fenced_id: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("last_plan", "sequences", "host_blocks", "host_tags")
    LAST_PLAN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_TAGS_FIELD_NUMBER: _ClassVar[int]
    last_plan: int
    sequences: _containers.RepeatedCompositeFieldContainer[ResidentSequence]
    host_blocks: bytes
    host_tags: bytes
    def __init__(self, last_plan: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[ResidentSequence, _Mapping]]] = ..., host_blocks: _Optional[bytes] = ..., host_tags: _Optional[bytes] = ...) -> None: ...

class ResidentSequence(_message.Message):
    __slots__ = ("slot", "sequence_id", "tokens", "prompt_len", "computed", "blocks", "context")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    sequence_id: int
    tokens: bytes
    prompt_len: int
    computed: int
    blocks: bytes
    context: bytes
    def __init__(self, slot: _Optional[int] = ..., sequence_id: _Optional[int] = ..., tokens: _Optional[bytes] = ..., prompt_len: _Optional[int] = ..., computed: _Optional[int] = ..., blocks: _Optional[bytes] = ..., context: _Optional[bytes] = ...) -> None: ...
