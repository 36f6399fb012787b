package main

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "roster-backend/rosterpb"
)

const (
	patience     = 30 * time.Second
	firstPause   = 50 * time.Millisecond
	longestPause = time.Second
	keepMs       = 10_000
)

// Message is one message of a conversation.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// ChatOptions are sampling options. A nil Temperature is the server's default, 1.
type ChatOptions struct {
	MaxTokens   uint32
	Temperature *float32
}

// End is the end of an answer: the reason, and the token counts.
type End struct {
	Reason           string
	PromptTokens     uint32
	CompletionTokens uint32
}

// Roster streams chats that survive broken connections. If the server is overloaded, the request is retried when the
// server says so. A broken stream resumes by Attach from the tokens received so far. If the server no longer has the
// request, it is sent again with those tokens and continues after them; the id and the seed are fixed before the request
// is first sent.
type Roster struct {
	client pb.InferenceServiceClient
	token  string
}

// NewRoster uses a connection opened by the caller, with or without TLS. token may be "".
func NewRoster(connection grpc.ClientConnInterface, token string) *Roster {
	return &Roster{client: pb.NewInferenceServiceClient(connection), token: token}
}

// Chat calls text with each piece of the answer, in order. When ctx ends, the request is cancelled.
func (r *Roster) Chat(ctx context.Context, messages []Message, options ChatOptions, text func(string)) (End, error) {
	request, err := chatRequest(messages, options)
	if err != nil {
		return End{}, err
	}
	if r.token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+r.token)
	}
	answer := &answer{text: text}
	next, pause := callGenerate, firstPause
	var failingSince time.Time
	for {
		progressed, err := r.read(ctx, next, request, answer)
		if err == nil {
			return answer.end, nil
		}
		if ctx.Err() != nil {
			r.cancel(request.RequestId)
			return End{}, ctx.Err()
		}
		if progressed || failingSince.IsZero() {
			failingSince, pause = time.Now(), firstPause
		}
		var known bool
		if next, known = nextCall(err, next, answer.begun); !known || time.Since(failingSince) > patience {
			return End{}, err
		}
		wait := pause
		if told, ok := retryDelay(err); ok {
			wait = told
		}
		time.Sleep(wait)
		if pause *= 2; pause > longestPause {
			pause = longestPause
		}
	}
}

type call int

const (
	callGenerate call = iota
	callAttach
)

// read opens one stream and reads it to its end; progressed says whether any message arrived.
func (r *Roster) read(ctx context.Context, next call, request *pb.GenerateRequest, answer *answer) (progressed bool, err error) {
	receive, err := r.open(ctx, next, request, answer)
	if err != nil {
		return false, err
	}
	for {
		response, err := receive()
		if errors.Is(err, io.EOF) {
			return progressed, nil
		}
		if err != nil {
			return progressed, err
		}
		progressed = true
		if err := answer.take(response); err != nil {
			return progressed, err
		}
	}
}

func (r *Roster) open(ctx context.Context, next call, request *pb.GenerateRequest, answer *answer) (func() (*pb.GenerateResponse, error), error) {
	if next == callAttach {
		rest := &pb.AttachRequest{RequestId: request.RequestId, Received: []uint32{uint32(len(answer.tokenIds))}}
		stream, err := r.client.Attach(ctx, rest)
		if err != nil {
			return nil, err
		}
		return func() (*pb.GenerateResponse, error) {
			message, err := stream.Recv()
			return message.GetResponse(), err
		}, nil
	}
	request.ReceivedTokenIds = answer.tokenIds
	stream, err := r.client.Generate(ctx, request)
	if err != nil {
		return nil, err
	}
	return stream.Recv, nil
}

// cancel is best effort: the server keeps a request without a reader for at most keepMs.
func (r *Roster) cancel(requestID string) {
	ctx, stop := context.WithTimeout(context.Background(), 2*time.Second)
	defer stop()
	if r.token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+r.token)
	}
	_, _ = r.client.Cancel(ctx, &pb.CancelRequest{RequestId: requestID})
}

// answer is the answer received so far. A gap in the token count is an error, because text would be missing.
type answer struct {
	text     func(string)
	tokenIds []uint32
	begun    bool
	end      End
}

func (a *answer) take(response *pb.GenerateResponse) error {
	a.begun = true
	for _, delta := range response.GetDeltas() {
		if int(delta.FirstIndex) != len(a.tokenIds) {
			return status.Errorf(codes.DataLoss, "token %d is missing", len(a.tokenIds))
		}
		a.tokenIds = append(a.tokenIds, delta.TokenIds...)
		if delta.Text != "" {
			a.text(delta.Text)
		}
	}
	for _, finish := range response.GetFinishes() {
		a.end.Reason = strings.ToLower(strings.TrimPrefix(finish.Reason.String(), "FINISH_REASON_"))
	}
	if usage := response.GetUsage(); usage != nil {
		a.end.PromptTokens, a.end.CompletionTokens = usage.PromptTokens, usage.CompletionTokens
	}
	return nil
}

func chatRequest(messages []Message, options ChatOptions) (*pb.GenerateRequest, error) {
	var drawn [24]byte
	if _, err := rand.Read(drawn[:]); err != nil {
		return nil, err
	}
	chat := &pb.Chat{}
	for _, message := range messages {
		part := &pb.ContentPart{Kind: &pb.ContentPart_Text{Text: message.Content}}
		chat.Messages = append(chat.Messages, &pb.ChatMessage{Role: message.Role, Parts: []*pb.ContentPart{part}})
	}
	return &pb.GenerateRequest{
		RequestId: hex.EncodeToString(drawn[:16]),
		Prompt:    &pb.Prompt{Kind: &pb.Prompt_Chat{Chat: chat}},
		Sampling: &pb.SamplingParameters{
			Temperature: options.Temperature,
			Seed:        proto.Uint64(binary.LittleEndian.Uint64(drawn[16:])),
		},
		Stop:         &pb.StopConditions{MaxTokens: proto.Uint32(options.MaxTokens)},
		OnDisconnect: pb.OnDisconnect_ON_DISCONNECT_KEEP,
		KeepMs:       proto.Uint32(keepMs),
	}, nil
}

// nextCall returns the call to make after an error; false if the error is to be returned.
func nextCall(err error, last call, begun bool) (call, bool) {
	switch status.Code(err) {
	case codes.ResourceExhausted:
		return callGenerate, true
	case codes.Unavailable, codes.Aborted, codes.Canceled: // the caller's own context was checked before
		if begun {
			return callAttach, true
		}
		return callGenerate, true
	case codes.NotFound:
		return callGenerate, last == callAttach
	case codes.AlreadyExists:
		return callAttach, true
	default:
		return callGenerate, false
	}
}

func retryDelay(err error) (time.Duration, bool) {
	for _, detail := range status.Convert(err).Details() {
		if retry, ok := detail.(*errdetails.RetryInfo); ok {
			delay := retry.GetRetryDelay()
			return time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos()), true
		}
	}
	return 0, false
}

// explain returns an error as a sentence that names the invalid fields.
func explain(err error) string {
	refused := status.Convert(err)
	parts := []string{refused.Message()}
	for _, detail := range refused.Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok {
			for _, violation := range bad.FieldViolations {
				if part := fmt.Sprintf("%s: %s", violation.Field, violation.Description); !strings.Contains(parts[0], part) {
					parts = append(parts, part)
				}
			}
		}
	}
	return strings.Join(parts, "; ")
}
