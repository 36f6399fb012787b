from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_KIND_UNSPECIFIED: _ClassVar[RowKind]
    ROW_KIND_PREFILL: _ClassVar[RowKind]
    ROW_KIND_DECODE: _ClassVar[RowKind]
ROW_KIND_UNSPECIFIED: RowKind
ROW_KIND_PREFILL: RowKind
ROW_KIND_DECODE: RowKind

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "uptime_s", "policy", "policy_parameters", "waiting", "waiting_tokens", "runners", "totals", "held_back", "profile", "retention", "retention_parameters", "draining", "moves", "groups")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNERS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    HELD_BACK_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_s: float
    policy: str
    policy_parameters: str
    waiting: int
    waiting_tokens: int
    runners: _containers.RepeatedCompositeFieldContainer[RunnerStatus]
    totals: Totals
    held_back: _containers.RepeatedCompositeFieldContainer[HeldBackRunner]
    profile: str
    retention: str
    retention_parameters: str
    draining: bool
    moves: Moves
    groups: RankGroups
    def __init__(self, version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., policy: _Optional[str] = ..., policy_parameters: _Optional[str] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., runners: _Optional[_Iterable[_Union[RunnerStatus, _Mapping]]] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ..., held_back: _Optional[_Iterable[_Union[HeldBackRunner, _Mapping]]] = ..., profile: _Optional[str] = ..., retention: _Optional[str] = ..., retention_parameters: _Optional[str] = ..., draining: _Optional[bool] = ..., moves: _Optional[_Union[Moves, _Mapping]] = ..., groups: _Optional[_Union[RankGroups, _Mapping]] = ...) -> None: ...

class RankGroups(_message.Message):
    __slots__ = ("groups", "formed_again", "pauses_s")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    FORMED_AGAIN_FIELD_NUMBER: _ClassVar[int]
    PAUSES_S_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[RankGroup]
    formed_again: int
    pauses_s: float
    def __init__(self, groups: _Optional[_Iterable[_Union[RankGroup, _Mapping]]] = ..., formed_again: _Optional[int] = ..., pauses_s: _Optional[float] = ...) -> None: ...

class RankGroup(_message.Message):
    __slots__ = ("id", "ranks", "epoch", "serves", "lost", "lost_s", "away_s", "away_because")
    ID_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LOST_S_FIELD_NUMBER: _ClassVar[int]
    AWAY_S_FIELD_NUMBER: _ClassVar[int]
    AWAY_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    id: str
    ranks: int
    epoch: int
    serves: bool
    lost: str
    lost_s: float
    away_s: float
    away_because: str
    def __init__(self, id: _Optional[str] = ..., ranks: _Optional[int] = ..., epoch: _Optional[int] = ..., serves: _Optional[bool] = ..., lost: _Optional[str] = ..., lost_s: _Optional[float] = ..., away_s: _Optional[float] = ..., away_because: _Optional[str] = ...) -> None: ...

class Moves(_message.Message):
    __slots__ = ("sequences", "under_way", "failed", "blocks", "bytes", "copy_s", "pause_s", "by_use")
    class BytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ByUseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    UNDER_WAY_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    COPY_S_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    BY_USE_FIELD_NUMBER: _ClassVar[int]
    sequences: int
    under_way: int
    failed: int
    blocks: int
    bytes: _containers.ScalarMap[str, int]
    copy_s: float
    pause_s: float
    by_use: _containers.ScalarMap[str, int]
    def __init__(self, sequences: _Optional[int] = ..., under_way: _Optional[int] = ..., failed: _Optional[int] = ..., blocks: _Optional[int] = ..., bytes: _Optional[_Mapping[str, int]] = ..., copy_s: _Optional[float] = ..., pause_s: _Optional[float] = ..., by_use: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RunnerStatus(_message.Message):
    __slots__ = ("id", "device", "model", "slots", "running", "blocks", "free_blocks", "cached_blocks", "block_size", "plans_in_flight", "last_plan", "decoder", "drafter", "max_drafts", "draft_gain", "numerics", "host_blocks", "host_used_blocks", "role", "conversations")
    ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PLANS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LAST_PLAN_FIELD_NUMBER: _ClassVar[int]
    DECODER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_GAIN_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    id: str
    device: str
    model: str
    slots: int
    running: int
    blocks: int
    free_blocks: int
    cached_blocks: int
    block_size: int
    plans_in_flight: int
    last_plan: int
    decoder: str
    drafter: str
    max_drafts: int
    draft_gain: float
    numerics: str
    host_blocks: int
    host_used_blocks: int
    role: str
    conversations: int
    def __init__(self, id: _Optional[str] = ..., device: _Optional[str] = ..., model: _Optional[str] = ..., slots: _Optional[int] = ..., running: _Optional[int] = ..., blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., plans_in_flight: _Optional[int] = ..., last_plan: _Optional[int] = ..., decoder: _Optional[str] = ..., drafter: _Optional[str] = ..., max_drafts: _Optional[int] = ..., draft_gain: _Optional[float] = ..., numerics: _Optional[str] = ..., host_blocks: _Optional[int] = ..., host_used_blocks: _Optional[int] = ..., role: _Optional[str] = ..., conversations: _Optional[int] = ...) -> None: ...

class HeldBackRunner(_message.Message):
    __slots__ = ("id", "losses", "reason", "present", "next_probe_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    NEXT_PROBE_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    losses: int
    reason: str
    present: bool
    next_probe_s: float
    def __init__(self, id: _Optional[str] = ..., losses: _Optional[int] = ..., reason: _Optional[str] = ..., present: _Optional[bool] = ..., next_probe_s: _Optional[float] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("requests", "refused", "finished", "sampled_tokens", "prefill_tokens", "preemptions", "cached_tokens", "dropped_rows", "policy_failures", "plans", "policy_changes", "policy_overruns", "drafted_tokens", "accepted_tokens", "decode_rows", "forced_tokens", "swaps", "host_tier")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_ROWS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FAILURES_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    POLICY_CHANGES_FIELD_NUMBER: _ClassVar[int]
    POLICY_OVERRUNS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    FORCED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SWAPS_FIELD_NUMBER: _ClassVar[int]
    HOST_TIER_FIELD_NUMBER: _ClassVar[int]
    requests: int
    refused: int
    finished: int
    sampled_tokens: int
    prefill_tokens: int
    preemptions: int
    cached_tokens: int
    dropped_rows: int
    policy_failures: int
    plans: int
    policy_changes: int
    policy_overruns: int
    drafted_tokens: int
    accepted_tokens: int
    decode_rows: int
    forced_tokens: int
    swaps: int
    host_tier: HostTier
    def __init__(self, requests: _Optional[int] = ..., refused: _Optional[int] = ..., finished: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., dropped_rows: _Optional[int] = ..., policy_failures: _Optional[int] = ..., plans: _Optional[int] = ..., policy_changes: _Optional[int] = ..., policy_overruns: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., decode_rows: _Optional[int] = ..., forced_tokens: _Optional[int] = ..., swaps: _Optional[int] = ..., host_tier: _Optional[_Union[HostTier, _Mapping]] = ...) -> None: ...

class HostTier(_message.Message):
    __slots__ = ("loaded_tokens", "loaded_blocks", "loaded_bytes", "load_s", "offloaded_blocks", "offloaded_bytes", "offload_s", "demoted_blocks", "dropped_blocks", "wasted_blocks", "prefetched_blocks", "unused_blocks")
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    OFFLOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OFFLOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_S_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WASTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    loaded_tokens: int
    loaded_blocks: int
    loaded_bytes: int
    load_s: float
    offloaded_blocks: int
    offloaded_bytes: int
    offload_s: float
    demoted_blocks: int
    dropped_blocks: int
    wasted_blocks: int
    prefetched_blocks: int
    unused_blocks: int
    def __init__(self, loaded_tokens: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., load_s: _Optional[float] = ..., offloaded_blocks: _Optional[int] = ..., offloaded_bytes: _Optional[int] = ..., offload_s: _Optional[float] = ..., demoted_blocks: _Optional[int] = ..., dropped_blocks: _Optional[int] = ..., wasted_blocks: _Optional[int] = ..., prefetched_blocks: _Optional[int] = ..., unused_blocks: _Optional[int] = ...) -> None: ...

class WatchStepsRequest(_message.Message):
    __slots__ = ("done",)
    DONE_FIELD_NUMBER: _ClassVar[int]
    done: bool
    def __init__(self, done: _Optional[bool] = ...) -> None: ...

class WatchStepsResponse(_message.Message):
    __slots__ = ("number", "runner", "time_s", "rows", "joined", "left", "slots", "waiting", "free_blocks", "blocks", "policy", "done_s", "run_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DONE_S_FIELD_NUMBER: _ClassVar[int]
    RUN_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    runner: str
    time_s: float
    rows: _containers.RepeatedCompositeFieldContainer[StepRow]
    joined: _containers.RepeatedCompositeFieldContainer[SequenceRef]
    left: _containers.RepeatedCompositeFieldContainer[Leave]
    slots: int
    waiting: int
    free_blocks: int
    blocks: int
    policy: str
    done_s: float
    run_s: float
    def __init__(self, number: _Optional[int] = ..., runner: _Optional[str] = ..., time_s: _Optional[float] = ..., rows: _Optional[_Iterable[_Union[StepRow, _Mapping]]] = ..., joined: _Optional[_Iterable[_Union[SequenceRef, _Mapping]]] = ..., left: _Optional[_Iterable[_Union[Leave, _Mapping]]] = ..., slots: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., blocks: _Optional[int] = ..., policy: _Optional[str] = ..., done_s: _Optional[float] = ..., run_s: _Optional[float] = ...) -> None: ...

class SequenceRef(_message.Message):
    __slots__ = ("request_id", "index", "slot")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    slot: int
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., slot: _Optional[int] = ...) -> None: ...

class StepRow(_message.Message):
    __slots__ = ("sequence", "start", "count", "sample", "kind", "drafts", "drafted", "accepted", "forced")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceRef
    start: int
    count: int
    sample: bool
    kind: RowKind
    drafts: int
    drafted: int
    accepted: int
    forced: int
    def __init__(self, sequence: _Optional[_Union[SequenceRef, _Mapping]] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., sample: _Optional[bool] = ..., kind: _Optional[_Union[RowKind, str]] = ..., drafts: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., forced: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("sequence", "reason")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceRef
    reason: str
    def __init__(self, sequence: _Optional[_Union[SequenceRef, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class WatchRosterRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class WatchRosterResponse(_message.Message):
    __slots__ = ("time_s", "status", "running", "waiting", "ttft_s", "itl_s", "run_s", "idle_s")
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    RUN_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    time_s: float
    status: GetStatusResponse
    running: _containers.RepeatedCompositeFieldContainer[RunningSequence]
    waiting: _containers.RepeatedCompositeFieldContainer[TenantQueue]
    ttft_s: Histogram
    itl_s: Histogram
    run_s: float
    idle_s: float
    def __init__(self, time_s: _Optional[float] = ..., status: _Optional[_Union[GetStatusResponse, _Mapping]] = ..., running: _Optional[_Iterable[_Union[RunningSequence, _Mapping]]] = ..., waiting: _Optional[_Iterable[_Union[TenantQueue, _Mapping]]] = ..., ttft_s: _Optional[_Union[Histogram, _Mapping]] = ..., itl_s: _Optional[_Union[Histogram, _Mapping]] = ..., run_s: _Optional[float] = ..., idle_s: _Optional[float] = ...) -> None: ...

class RunningSequence(_message.Message):
    __slots__ = ("sequence", "runner", "tenant", "kind", "prompt_tokens", "computed", "generated", "max_tokens", "age_s", "preemptions", "drafted_tokens", "accepted_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceRef
    runner: str
    tenant: str
    kind: RowKind
    prompt_tokens: int
    computed: int
    generated: int
    max_tokens: int
    age_s: float
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, sequence: _Optional[_Union[SequenceRef, _Mapping]] = ..., runner: _Optional[str] = ..., tenant: _Optional[str] = ..., kind: _Optional[_Union[RowKind, str]] = ..., prompt_tokens: _Optional[int] = ..., computed: _Optional[int] = ..., generated: _Optional[int] = ..., max_tokens: _Optional[int] = ..., age_s: _Optional[float] = ..., preemptions: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class TenantQueue(_message.Message):
    __slots__ = ("tenant", "waiting")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    waiting: int
    def __init__(self, tenant: _Optional[str] = ..., waiting: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running", "waiting", "remaining_ms", "done", "ended_early")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ENDED_EARLY_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    remaining_ms: int
    done: bool
    ended_early: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., remaining_ms: _Optional[int] = ..., done: _Optional[bool] = ..., ended_early: _Optional[int] = ...) -> None: ...

class ListPoliciesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPoliciesResponse(_message.Message):
    __slots__ = ("policies", "policy", "policy_parameters", "retention", "retention_parameters")
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.RepeatedCompositeFieldContainer[PolicyDescription]
    policy: str
    policy_parameters: str
    retention: str
    retention_parameters: str
    def __init__(self, policies: _Optional[_Iterable[_Union[PolicyDescription, _Mapping]]] = ..., policy: _Optional[str] = ..., policy_parameters: _Optional[str] = ..., retention: _Optional[str] = ..., retention_parameters: _Optional[str] = ...) -> None: ...

class PolicyDescription(_message.Message):
    __slots__ = ("name", "summary", "parameters", "distribution", "problem")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    summary: str
    parameters: _containers.RepeatedCompositeFieldContainer[PolicyParameter]
    distribution: str
    problem: str
    def __init__(self, name: _Optional[str] = ..., summary: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[PolicyParameter, _Mapping]]] = ..., distribution: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class PolicyParameter(_message.Message):
    __slots__ = ("name", "schema", "default_value", "description")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_VALUE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    schema: str
    default_value: str
    description: str
    def __init__(self, name: _Optional[str] = ..., schema: _Optional[str] = ..., default_value: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("name", "parameters", "retention")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: str
    retention: bool
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[str] = ..., retention: _Optional[bool] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ("policy", "policy_parameters", "former_policy", "former_parameters", "waiting", "running")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    FORMER_POLICY_FIELD_NUMBER: _ClassVar[int]
    FORMER_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    policy: str
    policy_parameters: str
    former_policy: str
    former_parameters: str
    waiting: int
    running: int
    def __init__(self, policy: _Optional[str] = ..., policy_parameters: _Optional[str] = ..., former_policy: _Optional[str] = ..., former_parameters: _Optional[str] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...
