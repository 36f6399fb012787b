/**
 * A web backend: `POST /chat` with `{"messages": [{"role": "user", "content": "..."}], "max_tokens": 64, "temperature": 0.7}`
 * answers with server-sent events, one JSON object each. If the browser disconnects, its request is cancelled in Roster.
 */
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { text } from "node:stream/consumers";

import { Code, ConnectError } from "@connectrpc/connect";

import { type ChatOptions, explain, type Message, Roster } from "./roster.js";

const LARGEST_BODY = 1 << 20;
const LARGEST_UINT32 = 0xffff_ffff;
const HTTP_STATUS = new Map([
  [Code.InvalidArgument, 400],
  [Code.OutOfRange, 400],
  [Code.Unauthenticated, 401],
  [Code.PermissionDenied, 403],
  [Code.ResourceExhausted, 429],
  [Code.Unavailable, 503],
  [Code.DeadlineExceeded, 504],
]);

const token = process.env["ROSTER_TOKEN"];
const roster = new Roster({
  url: `http://${process.env["ROSTER_ADDRESS"] ?? "127.0.0.1:50061"}`,
  ...(token === undefined ? {} : { token }),
});

const server = createServer((request, response) => {
  if (request.method !== "POST" || request.url !== "/chat") {
    answerError(response, 404, "use POST /chat");
    return;
  }
  void chat(request, response);
});

async function chat(request: IncomingMessage, response: ServerResponse): Promise<void> {
  const gone = new AbortController();
  response.on("close", () => {
    if (!response.writableFinished) gone.abort();
  });
  try {
    const { messages, options } = parse(await body(request));
    for await (const event of roster.chat(messages, options, gone.signal)) {
      if (!response.headersSent) response.writeHead(200, { "content-type": "text/event-stream" });
      response.write(`data: ${JSON.stringify(event)}\n\n`);
    }
    response.end();
  } catch (thrown) {
    fail(response, thrown);
  }
}

function fail(response: ServerResponse, thrown: unknown): void {
  const error = thrown instanceof ConnectError ? thrown : undefined;
  const message = error === undefined ? String(thrown) : explain(error);
  if (response.headersSent) {
    response.end(`data: ${JSON.stringify({ kind: "error", message })}\n\n`);
  } else if (error === undefined) {
    answerError(response, thrown instanceof BadInput ? 400 : 500, message);
  } else {
    answerError(response, HTTP_STATUS.get(error.code) ?? 500, message);
  }
}

class BadInput extends Error {
  override toString(): string {
    return this.message;
  }
}

async function body(request: IncomingMessage): Promise<string> {
  if (Number(request.headers["content-length"] ?? Infinity) > LARGEST_BODY) {
    throw new BadInput(`the body needs a content-length of at most ${LARGEST_BODY}`);
  }
  return text(request);
}

function isText(value: unknown): value is string {
  return typeof value === "string";
}

function parse(json: string): { messages: Message[]; options: ChatOptions } {
  let value: { messages?: Message[]; max_tokens?: number; temperature?: number };
  try {
    value = JSON.parse(json) ?? {};
  } catch {
    throw new BadInput("the body is not JSON");
  }
  const { messages, max_tokens: maxTokens = 256, temperature } = value;
  if (!Array.isArray(messages) || !messages.every((one) => isText(one?.role) && isText(one.content))) {
    throw new BadInput("messages must be a list of {role, content}, both strings");
  }
  if (!Number.isInteger(maxTokens) || maxTokens < 1 || maxTokens > LARGEST_UINT32) {
    throw new BadInput(`max_tokens must be a whole number from 1 to ${LARGEST_UINT32}`);
  }
  if (temperature !== undefined && typeof temperature !== "number") {
    throw new BadInput("temperature must be a number");
  }
  return { messages, options: { maxTokens, ...(temperature === undefined ? {} : { temperature }) } };
}

function answerError(response: ServerResponse, status: number, message: string): void {
  response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify({ error: message }));
}

server.listen(Number(process.env["PORT"] ?? 8080), "127.0.0.1", () => {
  console.log(`http://127.0.0.1:${(server.address() as AddressInfo).port}/chat`);
});
process.on("SIGTERM", () => server.close(() => process.exit(0)));
