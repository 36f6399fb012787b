from roster_protos import admin_pb2 as _admin_pb2
from roster_protos import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToEngine(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    def __init__(self, commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("hello", "submit", "cut", "cancel", "cancel_by_id", "attach", "disconnect", "status_query", "watch", "policies_query", "policy_change", "flush_prefixes", "roster_query", "kv_subscribe", "kv_unsubscribe", "forget", "drain", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_BY_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    DISCONNECT_FIELD_NUMBER: _ClassVar[int]
    STATUS_QUERY_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    POLICIES_QUERY_FIELD_NUMBER: _ClassVar[int]
    POLICY_CHANGE_FIELD_NUMBER: _ClassVar[int]
    FLUSH_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    ROSTER_QUERY_FIELD_NUMBER: _ClassVar[int]
    KV_SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    KV_UNSUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    submit: Submit
    cut: Cut
    cancel: Cancel
    cancel_by_id: CancelById
    attach: Attach
    disconnect: Disconnect
    status_query: StatusQuery
    watch: Watch
    policies_query: PoliciesQuery
    policy_change: PolicyChange
    flush_prefixes: FlushPrefixes
    roster_query: RosterQuery
    kv_subscribe: KvSubscribe
    kv_unsubscribe: KvUnsubscribe
    forget: Forget
    drain: Drain
    ping: Ping
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cut: _Optional[_Union[Cut, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., cancel_by_id: _Optional[_Union[CancelById, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., disconnect: _Optional[_Union[Disconnect, _Mapping]] = ..., status_query: _Optional[_Union[StatusQuery, _Mapping]] = ..., watch: _Optional[_Union[Watch, _Mapping]] = ..., policies_query: _Optional[_Union[PoliciesQuery, _Mapping]] = ..., policy_change: _Optional[_Union[PolicyChange, _Mapping]] = ..., flush_prefixes: _Optional[_Union[FlushPrefixes, _Mapping]] = ..., roster_query: _Optional[_Union[RosterQuery, _Mapping]] = ..., kv_subscribe: _Optional[_Union[KvSubscribe, _Mapping]] = ..., kv_unsubscribe: _Optional[_Union[KvUnsubscribe, _Mapping]] = ..., forget: _Optional[_Union[Forget, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: int
    def __init__(self, worker: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "tenant", "request_id", "digest", "body", "prompt", "received", "sampling", "n", "seed", "max_tokens", "priority", "ttft_target_ms", "itl_target_ms", "timeout_ms", "keep_ms", "cache_salt", "grammar", "open_ended", "grammar_kind", "no_speculation", "conversation_id", "kv_retain_s", "next_turn_s")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    ITL_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    KEEP_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    OPEN_ENDED_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_KIND_FIELD_NUMBER: _ClassVar[int]
    NO_SPECULATION_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    KV_RETAIN_S_FIELD_NUMBER: _ClassVar[int]
    NEXT_TURN_S_FIELD_NUMBER: _ClassVar[int]
    handle: int
    tenant: str
    request_id: str
    digest: bytes
    body: bytes
    prompt: bytes
    received: bytes
    sampling: _plan_pb2.Sampling
    n: int
    seed: int
    max_tokens: int
    priority: int
    ttft_target_ms: int
    itl_target_ms: int
    timeout_ms: int
    keep_ms: int
    cache_salt: str
    grammar: str
    open_ended: bool
    grammar_kind: str
    no_speculation: bool
    conversation_id: str
    kv_retain_s: float
    next_turn_s: float
    def __init__(self, handle: _Optional[int] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., digest: _Optional[bytes] = ..., body: _Optional[bytes] = ..., prompt: _Optional[bytes] = ..., received: _Optional[bytes] = ..., sampling: _Optional[_Union[_plan_pb2.Sampling, _Mapping]] = ..., n: _Optional[int] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., ttft_target_ms: _Optional[int] = ..., itl_target_ms: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., keep_ms: _Optional[int] = ..., cache_salt: _Optional[str] = ..., grammar: _Optional[str] = ..., open_ended: _Optional[bool] = ..., grammar_kind: _Optional[str] = ..., no_speculation: _Optional[bool] = ..., conversation_id: _Optional[str] = ..., kv_retain_s: _Optional[float] = ..., next_turn_s: _Optional[float] = ...) -> None: ...

class SequenceContext(_message.Message):
    __slots__ = ("submit", "index", "num_received", "arrival_unix_s", "deadline_unix_s", "cached_tokens")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    index: int
    num_received: int
    arrival_unix_s: float
    deadline_unix_s: float
    cached_tokens: int
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., index: _Optional[int] = ..., num_received: _Optional[int] = ..., arrival_unix_s: _Optional[float] = ..., deadline_unix_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Cut(_message.Message):
    __slots__ = ("sequence_id", "num_tokens", "stop_string")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_tokens: int
    stop_string: str
    def __init__(self, sequence_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., stop_string: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class CancelById(_message.Message):
    __slots__ = ("handle", "tenant", "request_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handle: int
    tenant: str
    request_id: str
    def __init__(self, handle: _Optional[int] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("handle", "tenant", "request_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handle: int
    tenant: str
    request_id: str
    def __init__(self, handle: _Optional[int] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class Disconnect(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class StatusQuery(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class RosterQuery(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class PoliciesQuery(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class PolicyChange(_message.Message):
    __slots__ = ("handle", "policy")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    handle: int
    policy: _admin_pb2.SetPolicyRequest
    def __init__(self, handle: _Optional[int] = ..., policy: _Optional[_Union[_admin_pb2.SetPolicyRequest, _Mapping]] = ...) -> None: ...

class Forget(_message.Message):
    __slots__ = ("handle", "tenant", "conversation_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_ID_FIELD_NUMBER: _ClassVar[int]
    handle: int
    tenant: str
    conversation_id: str
    def __init__(self, handle: _Optional[int] = ..., tenant: _Optional[str] = ..., conversation_id: _Optional[str] = ...) -> None: ...

class FlushPrefixes(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class KvSubscribe(_message.Message):
    __slots__ = ("handle", "after")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    handle: int
    after: int
    def __init__(self, handle: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class KvUnsubscribe(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class Watch(_message.Message):
    __slots__ = ("on",)
    ON_FIELD_NUMBER: _ClassVar[int]
    on: bool
    def __init__(self, on: _Optional[bool] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("handle", "timeout_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    timeout_ms: int
    def __init__(self, handle: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FromEngine(_message.Message):
    __slots__ = ("model", "accepted", "refused", "attached", "detached", "step", "done", "status_reply", "step_report", "policies_reply", "policy_changed", "step_done", "roster_reply", "kv_subscribed", "kv_changes", "forgotten", "drain_progress", "pong", "drained")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    STATUS_REPLY_FIELD_NUMBER: _ClassVar[int]
    STEP_REPORT_FIELD_NUMBER: _ClassVar[int]
    POLICIES_REPLY_FIELD_NUMBER: _ClassVar[int]
    POLICY_CHANGED_FIELD_NUMBER: _ClassVar[int]
    STEP_DONE_FIELD_NUMBER: _ClassVar[int]
    ROSTER_REPLY_FIELD_NUMBER: _ClassVar[int]
    KV_SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    KV_CHANGES_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    DRAIN_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    model: ModelState
    accepted: Accepted
    refused: Refused
    attached: Attached
    detached: Detached
    step: Step
    done: Done
    status_reply: StatusReply
    step_report: _admin_pb2.WatchStepsResponse
    policies_reply: PoliciesReply
    policy_changed: PolicyChanged
    step_done: StepDone
    roster_reply: RosterReply
    kv_subscribed: KvSubscribed
    kv_changes: KvChanges
    forgotten: Forgotten
    drain_progress: DrainProgress
    pong: Pong
    drained: Drained
    def __init__(self, model: _Optional[_Union[ModelState, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., detached: _Optional[_Union[Detached, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., status_reply: _Optional[_Union[StatusReply, _Mapping]] = ..., step_report: _Optional[_Union[_admin_pb2.WatchStepsResponse, _Mapping]] = ..., policies_reply: _Optional[_Union[PoliciesReply, _Mapping]] = ..., policy_changed: _Optional[_Union[PolicyChanged, _Mapping]] = ..., step_done: _Optional[_Union[StepDone, _Mapping]] = ..., roster_reply: _Optional[_Union[RosterReply, _Mapping]] = ..., kv_subscribed: _Optional[_Union[KvSubscribed, _Mapping]] = ..., kv_changes: _Optional[_Union[KvChanges, _Mapping]] = ..., forgotten: _Optional[_Union[Forgotten, _Mapping]] = ..., drain_progress: _Optional[_Union[DrainProgress, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ...) -> None: ...

class ModelState(_message.Message):
    __slots__ = ("model", "ready", "draining", "pool_tokens", "usual_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USUAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: _plan_pb2.Model
    ready: bool
    draining: bool
    pool_tokens: int
    usual_tokens: int
    def __init__(self, model: _Optional[_Union[_plan_pb2.Model, _Mapping]] = ..., ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., pool_tokens: _Optional[int] = ..., usual_tokens: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("handle", "first_sequence_id", "seed")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    handle: int
    first_sequence_id: int
    seed: int
    def __init__(self, handle: _Optional[int] = ..., first_sequence_id: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("handle", "code", "message", "field", "retry_after_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    code: int
    message: str
    field: str
    retry_after_ms: int
    def __init__(self, handle: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class Forgotten(_message.Message):
    __slots__ = ("handle", "tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    tokens: int
    def __init__(self, handle: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("handle", "body", "prompt", "num_received", "choices", "prompt_logprobs", "cached_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    body: bytes
    prompt: bytes
    num_received: int
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceRecord]
    prompt_logprobs: _plan_pb2.RowLogprobs
    cached_tokens: int
    def __init__(self, handle: _Optional[int] = ..., body: _Optional[bytes] = ..., prompt: _Optional[bytes] = ..., num_received: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[ChoiceRecord, _Mapping]]] = ..., prompt_logprobs: _Optional[_Union[_plan_pb2.RowLogprobs, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ChoiceRecord(_message.Message):
    __slots__ = ("sequence_id", "tokens", "logprobs", "end")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    tokens: bytes
    logprobs: _plan_pb2.RowLogprobs
    end: End
    def __init__(self, sequence_id: _Optional[int] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[_Union[_plan_pb2.RowLogprobs, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class Detached(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("sequence_ids", "tokens", "logprobs", "prompt_logprobs", "prompt_sequence_ids", "ends")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: bytes
    tokens: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[_plan_pb2.RowLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_plan_pb2.RowLogprobs]
    prompt_sequence_ids: bytes
    ends: _containers.RepeatedCompositeFieldContainer[End]
    def __init__(self, sequence_ids: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[_plan_pb2.RowLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_plan_pb2.RowLogprobs, _Mapping]]] = ..., prompt_sequence_ids: _Optional[bytes] = ..., ends: _Optional[_Iterable[_Union[End, _Mapping]]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("sequence_id", "reason", "stop_token_id", "stop_string", "message", "num_tokens", "cached_tokens", "queue_s", "drafted_tokens", "accepted_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    reason: int
    stop_token_id: int
    stop_string: str
    message: str
    num_tokens: int
    cached_tokens: int
    queue_s: float
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, sequence_id: _Optional[int] = ..., reason: _Optional[int] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ..., message: _Optional[str] = ..., num_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("handle", "status")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    status: _admin_pb2.GetStatusResponse
    def __init__(self, handle: _Optional[int] = ..., status: _Optional[_Union[_admin_pb2.GetStatusResponse, _Mapping]] = ...) -> None: ...

class RosterReply(_message.Message):
    __slots__ = ("handle", "roster")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    handle: int
    roster: _admin_pb2.WatchRosterResponse
    def __init__(self, handle: _Optional[int] = ..., roster: _Optional[_Union[_admin_pb2.WatchRosterResponse, _Mapping]] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("handle", "progress")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    progress: _admin_pb2.DrainResponse
    def __init__(self, handle: _Optional[int] = ..., progress: _Optional[_Union[_admin_pb2.DrainResponse, _Mapping]] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("runners_progress",)
    RUNNERS_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    runners_progress: bool
    def __init__(self, runners_progress: _Optional[bool] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ("ended_early",)
    ENDED_EARLY_FIELD_NUMBER: _ClassVar[int]
    ended_early: int
    def __init__(self, ended_early: _Optional[int] = ...) -> None: ...

class PoliciesReply(_message.Message):
    __slots__ = ("handle", "policies")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    policies: _admin_pb2.ListPoliciesResponse
    def __init__(self, handle: _Optional[int] = ..., policies: _Optional[_Union[_admin_pb2.ListPoliciesResponse, _Mapping]] = ...) -> None: ...

class PolicyChanged(_message.Message):
    __slots__ = ("handle", "change")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    change: _admin_pb2.SetPolicyResponse
    def __init__(self, handle: _Optional[int] = ..., change: _Optional[_Union[_admin_pb2.SetPolicyResponse, _Mapping]] = ...) -> None: ...

class StepDone(_message.Message):
    __slots__ = ("runner", "number", "done_s", "run_s", "drafted", "accepted")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DONE_S_FIELD_NUMBER: _ClassVar[int]
    RUN_S_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    runner: str
    number: int
    done_s: float
    run_s: float
    drafted: bytes
    accepted: bytes
    def __init__(self, runner: _Optional[str] = ..., number: _Optional[int] = ..., done_s: _Optional[float] = ..., run_s: _Optional[float] = ..., drafted: _Optional[bytes] = ..., accepted: _Optional[bytes] = ...) -> None: ...

class KvSubscribed(_message.Message):
    __slots__ = ("handle", "number", "snapshot", "replay")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    handle: int
    number: int
    snapshot: KvSnapshot
    replay: KvReplay
    def __init__(self, handle: _Optional[int] = ..., number: _Optional[int] = ..., snapshot: _Optional[_Union[KvSnapshot, _Mapping]] = ..., replay: _Optional[_Union[KvReplay, _Mapping]] = ...) -> None: ...

class KvSnapshot(_message.Message):
    __slots__ = ("names", "parents", "tokens", "partial", "on_host")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    ON_HOST_FIELD_NUMBER: _ClassVar[int]
    names: bytes
    parents: bytes
    tokens: bytes
    partial: bool
    on_host: bytes
    def __init__(self, names: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., partial: _Optional[bool] = ..., on_host: _Optional[bytes] = ...) -> None: ...

class KvReplay(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[KvChanges]
    def __init__(self, changes: _Optional[_Iterable[_Union[KvChanges, _Mapping]]] = ...) -> None: ...

class KvChanges(_message.Message):
    __slots__ = ("number", "unix_s", "changes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    number: int
    unix_s: float
    changes: _containers.RepeatedCompositeFieldContainer[KvChange]
    def __init__(self, number: _Optional[int] = ..., unix_s: _Optional[float] = ..., changes: _Optional[_Iterable[_Union[KvChange, _Mapping]]] = ...) -> None: ...

class KvChange(_message.Message):
    __slots__ = ("stored", "removed", "cleared", "on_host")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    ON_HOST_FIELD_NUMBER: _ClassVar[int]
    stored: KvStored
    removed: bytes
    cleared: KvCleared
    on_host: bool
    def __init__(self, stored: _Optional[_Union[KvStored, _Mapping]] = ..., removed: _Optional[bytes] = ..., cleared: _Optional[_Union[KvCleared, _Mapping]] = ..., on_host: _Optional[bool] = ...) -> None: ...

class KvStored(_message.Message):
    __slots__ = ("parent", "names", "tokens")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    parent: int
    names: bytes
    tokens: bytes
    def __init__(self, parent: _Optional[int] = ..., names: _Optional[bytes] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class KvCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
