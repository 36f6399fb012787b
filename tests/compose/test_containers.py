"""Tests that need real containers: privileges, images, the dashboard's data, and the restart of killed containers.

They run with ROSTER_COMPOSE=docker (`make test-compose`), after test_compose.py on the same stack.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import urllib.request
from collections.abc import Iterator

import pytest

pytest.importorskip("openai")

import openai

from tests.support.dashboard import queries, read_dashboard
from tests.support.docker_stack import DockerStack
from tests.support.prometheus import Prometheus, wait_for_data
from tests.support.stack_calls import answers, gateway_client, stream_chat, wait_until

READY_S = 300.0
LONG = 48
"""Tokens of an answer that survives its first runner."""

pytestmark = [
    pytest.mark.skipif(os.environ.get("ROSTER_COMPOSE") != "docker", reason="needs Docker: make test-compose"),
    pytest.mark.timeout(3000),
]


@pytest.fixture(scope="module")
def client(stack: DockerStack) -> Iterator[openai.OpenAI]:
    """Yields a client of the gateway, once each service is healthy."""

    def healthy() -> bool:
        assert stack.dead() == [], stack.logs()
        return all(stack.health(service) == "healthy" for service in stack.services)

    print(f"\nall healthy after {wait_until(healthy, READY_S, 'all healthy', stack.logs):.0f} s")
    with gateway_client(stack.gateway, stack.secrets) as opened:
        wait_for_answer(opened, stack)
        yield opened


def wait_for_answer(client: openai.OpenAI, stack: DockerStack) -> float:
    """Waits until a request is answered, and returns the seconds: the gateway takes its own time to detect a worker,
    independent of the containers' health checks."""
    return wait_until(lambda: answers(client), READY_S, "an answer", stack.logs)


def grafana(stack: DockerStack, path: str) -> urllib.request.Request:
    """Returns a request to Grafana's API as admin."""
    password = (stack.secrets / "grafana_password").read_text().strip()
    authorization = "Basic " + base64.b64encode(f"admin:{password}".encode()).decode()
    return urllib.request.Request(f"{stack.grafana}{path}", headers={"Authorization": authorization})


def test_no_container_runs_as_root_or_has_a_writable_root(client: openai.OpenAI, stack: DockerStack) -> None:
    for service in stack.services:
        assert stack.execute(service, "id", "-u").stdout.strip() not in ("", "0"), service
        assert "Read-only file system" in stack.execute(service, "sh", "-c", "echo x > /var/x").stderr, service


def test_images_contain_only_what_they_need(client: openai.OpenAI, stack: DockerStack) -> None:
    for module in ("torch", "transformers", "smg"):
        assert "ModuleNotFoundError" in stack.execute("scheduler", "python", "-c", f"import {module}").stderr
    for module in ("grpc", "smg_grpc_proto"):
        assert stack.execute("scheduler", "python", "-c", f"import {module}").returncode == 0
    assert "ModuleNotFoundError" in stack.execute("gateway", "python", "-c", "import tokenizers").stderr
    for image in stack.images():
        print(f"image {image.name}: {image.size / 1e6:.0f} MB")


def test_each_container_has_only_its_secrets(client: openai.OpenAI, stack: DockerStack) -> None:
    seen = {service: set(stack.execute(service, "ls", "/run/secrets").stdout.split()) for service in stack.services}
    assert seen == {
        "scheduler": {"scheduler.key", "runners", "tokens", "admin_tokens"},
        "runner-cpu": {"runner.key", "scheduler.pub"},
        "gateway": {"gateway_key"},
        "grafana": {"grafana_password"},
        "prometheus": set(),
    }


def test_only_the_gateway_reaches_the_listener_without_tokens(client: openai.OpenAI, stack: DockerStack) -> None:
    """The scheduler's listener for it is only on their common network."""

    def reaches(service: str, host: str) -> bool:
        connect = f"import socket; socket.create_connection(({host!r}, 50065), 3)"
        return stack.execute(service, "python", "-c", connect).returncode == 0

    assert reaches("gateway", "scheduler-for-gateway")
    address = stack.execute("scheduler", "getent", "hosts", "scheduler-for-gateway").stdout.split()[0]
    for host in ("scheduler", "scheduler-for-gateway", address):
        assert not reaches("runner-cpu", host), host


def test_the_dashboard_has_data(client: openai.OpenAI, stack: DockerStack) -> None:
    """Queried through Grafana's data source, while chats run."""
    with urllib.request.urlopen(grafana(stack, "/api/dashboards/uid/roster"), timeout=30) as answer:
        assert json.load(answer)["dashboard"]["title"] == read_dashboard()["title"]
    source = grafana(stack, "/api/datasources/proxy/uid/prometheus")
    over = threading.Event()

    def chat() -> None:
        while not over.is_set():
            list(stream_chat(client))

    threads = [threading.Thread(target=chat) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait_for_data(Prometheus(source.full_url, dict(source.headers)), queries("30s"), 120)
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_prometheus_scrapes_all_and_has_the_alerts(client: openai.OpenAI, stack: DockerStack) -> None:
    source = grafana(stack, "/api/datasources/proxy/uid/prometheus")
    server = Prometheus(source.full_url, dict(source.headers))
    up = {sample["metric"]["job"]: sample["value"][1] for sample in server.query("up")}
    assert up == {"roster": "1", "gateway": "1"}
    assert server.query('ALERTS{alertstate="firing"}') == []
    request = urllib.request.Request(f"{server.url}/api/v1/rules", headers=server.headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        (group,) = json.load(answer)["data"]["groups"]
    assert len(group["rules"]) >= 9 and {rule["health"] for rule in group["rules"]} == {"ok"}


def killed(stack: DockerStack, service: str) -> int:
    """Kills a service; returns its number of restarts before."""
    restarts = stack.restarts(service)
    stack.kill(service)
    return restarts


def back(stack: DockerStack, service: str, restarts: int) -> float:
    """Waits until a killed service has been restarted and is healthy; returns the seconds."""

    def healthy() -> bool:
        return stack.restarts(service) > restarts and stack.health(service) == "healthy"

    return wait_until(healthy, READY_S, f"{service} is back", stack.logs)


def test_a_stream_survives_its_runner(client: openai.OpenAI, stack: DockerStack) -> None:
    whole = list(stream_chat(client, LONG))
    stream = stream_chat(client, LONG)
    begun = [next(stream), next(stream)]
    restarts = killed(stack, "runner-cpu")
    assert "".join([*begun, *stream]) == "".join(whole)
    print(f"\nrunner-cpu: back after {back(stack, 'runner-cpu', restarts):.0f} s")
    wait_for_answer(client, stack)


@pytest.mark.parametrize("service", ["scheduler", "gateway", "prometheus", "grafana"])
def test_a_killed_container_comes_back(client: openai.OpenAI, stack: DockerStack, service: str) -> None:
    restarts = killed(stack, service)
    answered = wait_for_answer(client, stack)
    healthy = back(stack, service, restarts)
    print(f"\n{service}: chats again after {answered:.0f} s, healthy after {answered + healthy:.0f} s")
    wait_for_answer(client, stack)
    assert "Paris" in "".join(stream_chat(client))
