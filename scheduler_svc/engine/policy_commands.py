"""ListPolicies and SetPolicy: loads policies in the background and installs them between two steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from roster_protos import admin_pb2, engine_pb2
from scheduler_svc.constrained.background import Background
from scheduler_svc.model.refusal import EngineRefusal
from scheduler_svc.policy import (
    Policy,
    PolicyGuard,
    UnknownPolicy,
    WrongParameters,
    create_policy,
    permitted_policy_class,
    permitted_retention,
)
from scheduler_svc.policy.catalog import describe_policies
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.runner_pool import RunnerPool

log = structlog.get_logger()


@dataclass(slots=True, frozen=True)
class InForce:
    """A policy by name and parameters (JSON)."""

    name: str
    parameters: str

    @classmethod
    def of(cls, policy: Policy) -> InForce:
        """Returns the policy's name and parameters as an operator sees them."""
        return cls(policy.name, policy.parameters.model_dump_json())


class PolicyCommands:
    """Executes the policy commands of the admin API."""

    def __init__(
        self,
        requests: Requests,
        pool: RunnerPool,
        change_policy: Callable[[Policy], None],
        folder: Path | None,
        retention: PolicyGuard,
        change_retention: Callable[[Policy], None],
    ) -> None:
        """`folder`: the setting `policy_dir`. `retention`: the policy that decides what prefix caches keep."""
        self._retention = retention
        self._change_retention = change_retention
        self._folder = folder
        self._requests = requests
        self._pool = pool
        self._change_policy = change_policy
        self._background = Background()

    @property
    def busy(self) -> bool:
        """Whether a policy is being loaded: `finish` will have work soon."""
        return self._background.busy

    def finish(self) -> None:
        """Installs the policies loaded since the last call and answers. Called between two steps."""
        self._background.collect()

    def list(self, worker: bytes, query: engine_pb2.PoliciesQuery) -> None:
        """Answers with all policies that a call may name, and the one in force."""
        in_force, folder = type(self._requests.policy.policy), self._folder

        def answer(descriptions: list[admin_pb2.PolicyDescription]) -> None:
            now, kept = InForce.of(self._requests.policy.policy), InForce.of(self._retention.policy)
            policies = admin_pb2.ListPoliciesResponse(
                policies=descriptions,
                policy=now.name,
                policy_parameters=now.parameters,
                retention=kept.name,
                retention_parameters=kept.parameters,
            )
            reply = engine_pb2.PoliciesReply(handle=query.handle, policies=policies)
            self._requests.outbox.message(worker, engine_pb2.FromEngine(policies_reply=reply))

        self._background.run(lambda: describe_policies(in_force, folder), answer)

    def change(self, worker: bytes, change: engine_pb2.PolicyChange) -> None:
        """Loads the policy, installs it and answers; or answers with a refusal."""
        asked = change.policy

        def answer(loaded: Policy | EngineRefusal) -> None:
            if isinstance(loaded, EngineRefusal):
                self._requests.outbox.message(worker, loaded.to_message(change.handle))
                return
            put = self._retain_by if asked.retention else self._put_in_force
            reply = engine_pb2.PolicyChanged(handle=change.handle, change=put(loaded))
            self._requests.outbox.message(worker, engine_pb2.FromEngine(policy_changed=reply))

        self._background.run(lambda: _load(asked, self._folder), answer)

    def _retain_by(self, policy: Policy) -> admin_pb2.SetPolicyResponse:
        former = InForce.of(self._retention.policy)
        self._change_retention(policy)
        return self._changed("the retention changed", former, InForce.of(policy))

    def _put_in_force(self, policy: Policy) -> admin_pb2.SetPolicyResponse:
        former, new = InForce.of(self._requests.policy.policy), InForce.of(policy)
        self._change_policy(policy)
        return self._changed("the policy changed", former, new)

    def _changed(self, words: str, former: InForce, new: InForce) -> admin_pb2.SetPolicyResponse:
        """Counts and logs a change; returns the answer."""
        self._requests.totals.policy_changes += 1
        running = sum(scheduler.table.num_running for scheduler in self._pool.schedulers.values())
        log.info(
            words,
            policy=new.name,
            parameters=new.parameters,
            former=former.name,
            former_parameters=former.parameters,
            waiting=len(self._requests.queue),
            running=running,
        )
        return admin_pb2.SetPolicyResponse(
            policy=new.name,
            policy_parameters=new.parameters,
            former_policy=former.name,
            former_parameters=former.parameters,
            waiting=len(self._requests.queue),
            running=running,
        )


def _load(asked: admin_pb2.SetPolicyRequest, folder: Path | None) -> Policy | EngineRefusal:
    """Returns the policy, or why it can't be loaded. Never raises: third-party code runs here."""
    name = asked.name
    try:
        if asked.retention:
            return permitted_retention(name, _parsed(asked.parameters), folder)
        return create_policy(permitted_policy_class(name, folder), _parsed(asked.parameters))
    except UnknownPolicy as error:
        return EngineRefusal(grpc.StatusCode.NOT_FOUND, str(error), "name")
    except WrongParameters as error:
        return EngineRefusal(grpc.StatusCode.INVALID_ARGUMENT, str(error), "parameters")
    except Exception as error:
        return EngineRefusal(grpc.StatusCode.INVALID_ARGUMENT, f"policy {name!r} can't be started: {error!r}", "name")


def _parsed(text: str) -> dict[str, Any]:
    try:
        parameters = json.loads(text or "{}")
    except ValueError as error:
        raise WrongParameters(f"the parameters are not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise WrongParameters('the parameters must be a JSON object, {"step_tokens": 512} for example')
    return parameters
