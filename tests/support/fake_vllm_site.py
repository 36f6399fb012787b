"""A folder for `--peer-site` whose vLLM is a small server with the completions API, started by vLLM's own command line.

The server appends its command line to `calls`, and starts a process that stands for vLLM's engine and whose id is in
`engine`. With the environment variable FAKE_VLLM=dies it ends with a message, with FAKE_VLLM=waits it never serves.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "0.0.1"
_SERVER = """
import asyncio, json, os, pathlib, subprocess, sys, time

HERE = pathlib.Path(__file__).parents[3]
flags = dict(part[2:].partition("=")[::2] for part in sys.argv if part.startswith("--"))
with open(HERE / "calls", "a") as calls:
    calls.write(json.dumps([os.getcwd(), *sys.argv[1:]]) + "\\n")
engine = subprocess.Popen(["sleep", "300"])
(HERE / "engine").write_text(str(engine.pid))
if os.environ.get("FAKE_VLLM") == "dies":
    sys.exit("ValueError: Free memory on device is less than desired")
if os.environ.get("FAKE_VLLM") == "waits":
    time.sleep(300)

from aiohttp import web


async def complete(request):
    body = await request.json()
    assert body["temperature"] == 0.0 and body["ignore_eos"] and body["model"] == "peer"
    count, prompt = body["max_tokens"], body["prompt"]
    rows, length = (len(prompt), len(prompt[0])) if isinstance(prompt[0], list) else (1, len(prompt))
    usage = {"prompt_tokens": rows * length, "completion_tokens": rows * count}
    if not body["stream"]:
        await asyncio.sleep(0.002 * count)
        return web.json_response({"choices": [{"text": "t " * count}], "usage": usage})
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for token in range(count):
        await asyncio.sleep(0.002)
        await answer.write(b'data: {"choices": [{"text": "t5 "}]}\\n\\n')
    await answer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\\n\\ndata: [DONE]\\n\\n")
    return answer


async def health(request):
    return web.Response()


app = web.Application()
app.add_routes([web.get("/health", health), web.post("/v1/completions", complete)])
web.run_app(app, host=flags["host"], port=int(flags["port"]), print=None)
"""


def write_site(folder: Path) -> Path:
    """Writes the site and returns its folder."""
    package = folder / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for path in (folder / "vllm", package.parent, package):
        (path / "__init__.py").write_text("")
    (package / "main.py").write_text(_SERVER)
    facts = folder / f"vllm-{VERSION}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    return folder
