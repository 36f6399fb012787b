// A web backend: POST /chat with {"messages": [{"role": "user", "content": "..."}], "max_tokens": 64,
// "temperature": 0.7} answers with server-sent events, one JSON object each. If the browser disconnects, its request is
// cancelled in Roster.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"math"
	"net"
	"net/http"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

//go:generate protoc -I ../.. --go_out=. --go-grpc_out=. --go_opt=module=roster-backend --go-grpc_opt=module=roster-backend --go_opt=Mprotos/inference.proto=roster-backend/rosterpb --go-grpc_opt=Mprotos/inference.proto=roster-backend/rosterpb protos/inference.proto

const largestBody = 1 << 20

var httpStatus = map[codes.Code]int{
	codes.InvalidArgument:   http.StatusBadRequest,
	codes.OutOfRange:        http.StatusBadRequest,
	codes.Unauthenticated:   http.StatusUnauthorized,
	codes.PermissionDenied:  http.StatusForbidden,
	codes.ResourceExhausted: http.StatusTooManyRequests,
	codes.Unavailable:       http.StatusServiceUnavailable,
	codes.DeadlineExceeded:  http.StatusGatewayTimeout,
}

type question struct {
	Messages    []Message `json:"messages"`
	MaxTokens   *uint32   `json:"max_tokens"`
	Temperature *float32  `json:"temperature"`
}

type event struct {
	Kind             string `json:"kind"`
	Text             string `json:"text,omitempty"`
	Message          string `json:"message,omitempty"`
	Reason           string `json:"reason,omitempty"`
	PromptTokens     uint32 `json:"promptTokens,omitempty"`
	CompletionTokens uint32 `json:"completionTokens,omitempty"`
}

func main() {
	// For TLS: grpc.WithTransportCredentials(credentials.NewTLS(...)).
	connection, err := grpc.Dial(setting("ROSTER_ADDRESS", "127.0.0.1:50061"), grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	roster := NewRoster(connection, os.Getenv("ROSTER_TOKEN"))
	http.HandleFunc("/chat", func(w http.ResponseWriter, r *http.Request) { chat(roster, w, r) })
	listener, err := net.Listen("tcp", "127.0.0.1:"+setting("PORT", "8080"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("http://%s/chat\n", listener.Addr())
	log.Fatal(http.Serve(listener, nil))
}

func setting(name, otherwise string) string {
	if value := os.Getenv(name); value != "" {
		return value
	}
	return otherwise
}

func chat(roster *Roster, w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		http.Error(w, "use POST /chat", http.StatusMethodNotAllowed)
		return
	}
	asked, problem := parse(w, r)
	if problem != "" {
		answerError(w, http.StatusBadRequest, problem)
		return
	}
	options := ChatOptions{MaxTokens: 256, Temperature: asked.Temperature}
	if asked.MaxTokens != nil {
		options.MaxTokens = *asked.MaxTokens
	}
	begun := false
	send := func(one event) {
		if !begun {
			w.Header().Set("Content-Type", "text/event-stream")
			begun = true
		}
		line, _ := json.Marshal(one) // strings and numbers only
		fmt.Fprintf(w, "data: %s\n\n", line)
		if flusher, ok := w.(http.Flusher); ok {
			flusher.Flush()
		}
	}
	end, err := roster.Chat(r.Context(), asked.Messages, options, func(text string) { send(event{Kind: "text", Text: text}) })
	switch {
	case err == nil:
		send(event{Kind: "end", Reason: end.Reason, PromptTokens: end.PromptTokens, CompletionTokens: end.CompletionTokens})
	case begun:
		send(event{Kind: "error", Message: explain(err)})
	default:
		code, known := httpStatus[status.Code(err)]
		if !known {
			code = http.StatusInternalServerError
		}
		answerError(w, code, explain(err))
	}
}

// parse returns the question, or what is wrong with it.
func parse(w http.ResponseWriter, r *http.Request) (question, string) {
	var asked question
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, largestBody)).Decode(&asked)
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &wrong) && wrong.Field == "max_tokens", asked.MaxTokens != nil && *asked.MaxTokens == 0:
		return asked, fmt.Sprintf("max_tokens must be a whole number from 1 to %d", uint32(math.MaxUint32))
	case errors.As(err, &wrong) && wrong.Field == "temperature":
		return asked, "temperature must be a number"
	case errors.As(err, &wrong), err == nil && asked.Messages == nil:
		return asked, "messages must be a list of {role, content}, both strings"
	case err != nil:
		return asked, "the body must be JSON with messages, and optionally max_tokens and temperature"
	}
	return asked, ""
}

func answerError(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": message})
}
