/**
 * A chat with Roster that survives broken connections.
 *
 * If the server is overloaded, the request is retried when the server says so. A broken stream resumes by `Attach` from
 * the tokens received so far. If the server no longer has the request, it is sent again with those tokens and continues
 * after them; the id and the seed are fixed before the request is first sent.
 */
import { randomBytes, randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { create } from "@bufbuild/protobuf";
import { type Client, Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { BadRequestSchema, RetryInfoSchema } from "./generated/google/rpc/error_details_pb.js";
import {
  FinishReason,
  type GenerateRequest,
  GenerateRequestSchema,
  type GenerateResponse,
  InferenceService,
  OnDisconnect,
} from "./generated/inference_pb.js";

/** One message of a conversation. */
export interface Message {
  role: string;
  content: string;
}

/** A piece of text, or the end of the answer. */
export type ChatEvent =
  | { kind: "text"; text: string }
  | { kind: "end"; reason: string; promptTokens: number; completionTokens: number };

export interface ChatOptions {
  /** Maximum number of tokens of the answer. */
  maxTokens: number;
  /** 0 is greedy; the server's default is 1. */
  temperature?: number;
}

export interface RosterOptions {
  /** `http://host:port`, or `https://` for TLS. */
  url: string;
  /** Bearer token, if the server requires one. */
  token?: string;
  /** How long a failing or overloaded server is retried, in milliseconds. */
  patienceMs?: number;
}

const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 1000;

export class Roster {
  private readonly client: Client<typeof InferenceService>;
  private readonly headers: Record<string, string>;
  private readonly patienceMs: number;

  constructor({ url, token, patienceMs = 30_000 }: RosterOptions) {
    this.client = createClient(InferenceService, createGrpcTransport({ baseUrl: url, pingIntervalMs: 20_000 }));
    this.headers = token === undefined ? {} : { authorization: `Bearer ${token}` };
    this.patienceMs = patienceMs;
  }

  /** Streams the answer. Throws ConnectError, which `explain` formats. Abort the signal to cancel the request. */
  async *chat(messages: Message[], options: ChatOptions, signal: AbortSignal): AsyncGenerator<ChatEvent> {
    const request = chatRequest(messages, options);
    const answer = new Answer();
    let attach = false;
    let pauseMs = FIRST_PAUSE_MS;
    let failingSince: number | undefined;
    signal.addEventListener("abort", () => void this.cancel(request.requestId), { once: true });
    for (;;) {
      try {
        for await (const response of this.open(request, answer, attach, signal)) {
          failingSince = undefined;
          pauseMs = FIRST_PAUSE_MS;
          yield* answer.take(response);
        }
        return;
      } catch (thrown) {
        const error = ConnectError.from(thrown);
        failingSince ??= Date.now();
        const next: Call | undefined = signal.aborted ? undefined : nextCall(error, attach, answer.begun);
        if (next === undefined || Date.now() - failingSince > this.patienceMs) throw error;
        attach = next === "attach";
        await sleep(retryDelayMs(error) ?? pauseMs, undefined, { signal });
        pauseMs = Math.min(2 * pauseMs, LONGEST_PAUSE_MS);
      }
    }
  }

  /** Opens the stream: a new request, its rest by `Attach`, or the request again after the received tokens. */
  private async *open(
    request: GenerateRequest,
    answer: Answer,
    attach: boolean,
    signal: AbortSignal,
  ): AsyncGenerator<GenerateResponse> {
    const options = { headers: this.headers, signal };
    if (attach) {
      const rest = { requestId: request.requestId, received: [answer.tokenIds.length] };
      for await (const message of this.client.attach(rest, options)) {
        if (message.response !== undefined) yield message.response;
      }
    } else {
      yield* this.client.generate({ ...request, receivedTokenIds: answer.tokenIds }, options);
    }
  }

  /** Cancels the request, best effort: otherwise it ends by itself. */
  private async cancel(requestId: string): Promise<void> {
    try {
      await this.client.cancel({ requestId }, { headers: this.headers, timeoutMs: 2_000 });
    } catch {
      // The request has ended, or the server is gone; a request without a reader is kept for at most keepMs.
    }
  }
}

/** The answer received so far. A gap in the token count is an error, because text would be missing. */
class Answer {
  readonly tokenIds: number[] = [];
  begun = false;
  private reason = FinishReason.UNSPECIFIED;

  *take(response: GenerateResponse): Generator<ChatEvent> {
    this.begun = true;
    for (const delta of response.deltas) {
      if (delta.firstIndex !== this.tokenIds.length) {
        throw new ConnectError(`token ${this.tokenIds.length} is missing`, Code.DataLoss);
      }
      this.tokenIds.push(...delta.tokenIds);
      if (delta.text !== "") yield { kind: "text", text: delta.text };
    }
    for (const finish of response.finishes) this.reason = finish.reason;
    if (response.usage !== undefined) {
      const { promptTokens, completionTokens } = response.usage;
      yield { kind: "end", reason: FinishReason[this.reason].toLowerCase(), promptTokens, completionTokens };
    }
  }
}

function chatRequest(messages: Message[], { maxTokens, temperature }: ChatOptions): GenerateRequest {
  return create(GenerateRequestSchema, {
    requestId: randomUUID(),
    prompt: {
      kind: {
        case: "chat",
        value: {
          messages: messages.map(({ role, content }) => ({
            role,
            parts: [{ kind: { case: "text" as const, value: content } }],
          })),
        },
      },
    },
    sampling: { seed: randomBytes(8).readBigUInt64LE(), ...(temperature === undefined ? {} : { temperature }) },
    stop: { maxTokens },
    onDisconnect: OnDisconnect.KEEP,
    keepMs: 10_000,
  });
}

type Call = "attach" | "generate";

/** Returns the call to make after an error; undefined if the error is to be thrown. */
function nextCall(error: ConnectError, attached: boolean, begun: boolean): Call | undefined {
  switch (error.code) {
    case Code.ResourceExhausted:
      return "generate";
    case Code.Unavailable:
    case Code.Aborted:
    case Code.Canceled: // by a server that shuts down, or the connection; the caller's own signal was checked before
      return begun ? "attach" : "generate";
    case Code.NotFound:
      return attached ? "generate" : undefined;
    case Code.AlreadyExists:
      return "attach";
    default:
      return undefined;
  }
}

function retryDelayMs(error: ConnectError): number | undefined {
  const delay = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
  return delay === undefined ? undefined : Number(delay.seconds) * 1000 + delay.nanos / 1e6;
}

/** Returns the error as a sentence that names the invalid fields. */
export function explain(error: ConnectError): string {
  const fields = error.findDetails(BadRequestSchema).flatMap((detail) => detail.fieldViolations);
  const parts = fields.map(({ field, description }) => `${field}: ${description}`);
  return [error.rawMessage, ...parts.filter((part) => !error.rawMessage.includes(part))].join("; ");
}
