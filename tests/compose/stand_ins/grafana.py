"""A stand-in for Grafana: reads the provisioning like Grafana and answers four of its HTTP calls.

    GET /api/health                              without authentication
    GET /api/search                              the dashboards
    GET /api/dashboards/uid/UID                  one dashboard
    GET /api/datasources/proxy/uid/UID/PATH      the data source's answer

All but the first require basic authentication as admin. It draws nothing.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

PROVISIONING = Path("/etc/grafana/provisioning")
PORT = 3000


def provisioned(kind: str) -> list[dict[str, Any]]:
    """Returns the entries of every file of provisioning/KIND."""
    key = {"dashboards": "providers", "datasources": "datasources"}[kind]
    files = sorted((PROVISIONING / kind).glob("*.y*ml"))
    return [entry for file in files for entry in yaml.safe_load(file.read_text())[key]]


def dashboards() -> dict[str, Any]:
    """Returns the dashboards by uid, from the folders of the providers."""
    folders = [Path(provider["options"]["path"]) for provider in provisioned("dashboards")]
    documents = [json.loads(file.read_text()) for folder in folders for file in sorted(folder.glob("**/*.json"))]
    return {document["uid"]: document for document in documents}


SOURCES = {source["uid"]: source["url"] for source in provisioned("datasources")}
DASHBOARDS = dashboards()
PASSWORD = Path(os.environ["GF_SECURITY_ADMIN_PASSWORD__FILE"]).read_text().strip()
AUTHORIZATION = "Basic " + base64.b64encode(f"admin:{PASSWORD}".encode()).decode()


class Handler(BaseHTTPRequestHandler):
    """Handler of the HTTP calls."""

    def do_GET(self) -> None:
        """Answers a call."""
        status, body = self._answer()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def _answer(self) -> tuple[int, bytes]:
        if self.path == "/api/health":
            return 200, _json({"database": "ok"})
        if self.headers.get("Authorization") != AUTHORIZATION:
            return 401, _json({"message": "Unauthorized"})
        if self.path.startswith("/api/search"):
            return 200, _json([{"uid": uid, "title": found["title"]} for uid, found in DASHBOARDS.items()])
        *parts, last = self.path.split("/", 4)
        if parts == ["", "api", "dashboards", "uid"] and last in DASHBOARDS:
            return 200, _json({"dashboard": DASHBOARDS[last]})
        parts = self.path.split("/", 6)
        if parts[:5] == ["", "api", "datasources", "proxy", "uid"] and parts[5] in SOURCES:
            return _fetch(f"{SOURCES[parts[5]]}/{parts[6]}")
        return 404, _json({"message": "Not found"})


def _fetch(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except urllib.error.URLError as error:
        return 502, _json({"message": str(error)})


def _json(content: Any) -> bytes:
    return json.dumps(content).encode()


if __name__ == "__main__":
    Path("started").write_text("the data folder can be written to\n")
    ThreadingHTTPServer(("0.0.0.0", PORT), Handler).serve_forever()
