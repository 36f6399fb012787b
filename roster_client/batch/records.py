"""Lines of the output file: OpenAI's batch output format, one JSON object per request.

A request that the server answered or refused has a `response` with an HTTP status and a body. A line that is no request
has an `error` instead, with the number of the line.
"""

from __future__ import annotations

import secrets
from typing import Any

Record = dict[str, Any]

ID_PREFIX = "batch_req_"

BAD_REQUEST = 400
NOT_FOUND = 404
SERVER_ERROR = 500
TIMEOUT = 504


def answered(custom_id: str, request_id: str, body: Record) -> Record:
    """Returns the record of a request that was answered; `body`: as of OpenAI's endpoint."""
    return _record(custom_id, {"status_code": 200, "request_id": request_id, "body": body}, None)


def refused(custom_id: str, status: int, message: str, param: str | None = None, code: str | None = None) -> Record:
    """Returns the record of a request that was refused or failed; `status`: HTTP status, `param`: the field."""
    kind = "invalid_request_error" if status < SERVER_ERROR else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return _record(custom_id, {"status_code": status, "request_id": "", "body": {"error": error}}, None)


def broken(line: int, code: str, message: str, custom_id: str | None = None) -> Record:
    """Returns the record of a line that is not a request; `line`: its number, from 1."""
    return _record(custom_id, None, {"code": code, "message": f"line {line}: {message}", "line": line})


def is_error(record: Record) -> bool:
    """Returns whether the record is not an answer."""
    return error_message(record) is not None


def error_message(record: Record) -> str | None:
    """Returns what went wrong; None for an answer."""
    if record["error"] is not None:
        return str(record["error"]["message"])
    if record["response"]["status_code"] == 200:
        return None
    return f"{record['custom_id']}: {record['response']['body']['error']['message']}"


def _record(custom_id: str | None, response: Record | None, error: Record | None) -> Record:
    # The id is first, so that the beginning of a line that was cut short is recognized.
    return {"id": ID_PREFIX + secrets.token_hex(12), "custom_id": custom_id, "response": response, "error": error}
