"""Authentication of calls: each row of the table in tenant.py, and token files."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc import StatusCode

from scheduler_svc.front.base.refusal import Refusal
from scheduler_svc.front.request.tenant import MAX_TENANT_BYTES, Tenants, UnusableTokens

ACME = "acme-token-0123456789"
ZEN = "zen-token-0123456789"


def bearer(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")


def test_without_tokens_the_named_tenant_is_accepted() -> None:
    tenants = Tenants()
    assert not tenants.need_tokens
    assert tenants.of(()) == tenants.of(None) == ""
    assert tenants.of([("roster-tenant", "acme"), bearer("whatever")]) == "acme"
    with pytest.raises(Refusal, match="longer than 128 bytes") as caught:
        tenants.of([("roster-tenant", "x" * (MAX_TENANT_BYTES + 1))])
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


def test_with_tokens_the_token_names_the_tenant() -> None:
    tenants = Tenants({ACME: "acme", ZEN: "zen"})
    assert tenants.need_tokens
    assert tenants.of([bearer(ACME)]) == "acme"
    assert tenants.of([("roster-tenant", "zen"), ("authorization", f"bearer {ZEN}")]) == "zen"


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ([], StatusCode.UNAUTHENTICATED),
        ([("roster-tenant", "acme")], StatusCode.UNAUTHENTICATED),
        ([bearer("")], StatusCode.UNAUTHENTICATED),
        ([bearer(ACME[:-1])], StatusCode.UNAUTHENTICATED),
        ([bearer(ACME + " ")], StatusCode.UNAUTHENTICATED),
        ([("authorization", f"Basic {ACME}")], StatusCode.UNAUTHENTICATED),
        ([("authorization", ACME)], StatusCode.UNAUTHENTICATED),
        ([("authorization", b"Bearer \xff\xfe")], StatusCode.UNAUTHENTICATED),
        ([bearer(ACME), ("roster-tenant", "zen")], StatusCode.PERMISSION_DENIED),
        ([bearer(ACME), ("roster-tenant", "")], StatusCode.PERMISSION_DENIED),
    ],
)
def test_refused_credentials(metadata: list[tuple[str, str | bytes]], code: StatusCode) -> None:
    with pytest.raises(Refusal) as caught:
        Tenants({ACME: "acme", ZEN: "zen"}).of(metadata)
    assert caught.value.code is code
    assert ACME not in caught.value.message


def test_a_file_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# tenants and their tokens\nacme {ACME}\n\nacme  second-token-of-acme\nzen {ZEN}\n")
    tenants = Tenants.read(path)
    assert tenants.of([bearer("second-token-of-acme")]) == tenants.of([bearer(ACME)]) == "acme"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "contains no tokens"),
        ("acme\n", "line 1: write a tenant and its token"),
        (f"acme {ACME} more\n", "line 1: write a tenant and its token"),
        ("acme short\n", "line 1: a token must have at least 16 characters"),
        (f"acme {ACME}\nzen {ACME}\n", "line 2: an earlier line has the same token"),
        (f"{'x' * 129} {ACME}\n", "line 1: a tenant must be printable ASCII"),
    ],
)
def test_unusable_token_files(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(UnusableTokens, match=sentence) as caught:
        Tenants.read(path)
    assert ACME not in str(caught.value)
    with pytest.raises(UnusableTokens, match="can't be read"):
        Tenants.read(tmp_path / "none")
