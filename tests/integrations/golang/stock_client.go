// Go's net/http against a node or the gateway: go run stock_client.go URL. Ends with status 0 if all is as expected.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
)

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

type request struct {
	Model     string    `json:"model"`
	Messages  []message `json:"messages,omitempty"`
	Input     []string  `json:"input,omitempty"`
	MaxTokens int       `json:"max_tokens,omitempty"`
	Stream    bool      `json:"stream,omitempty"`
}

type choice struct {
	Message      message `json:"message"`
	Delta        message `json:"delta"`
	FinishReason string  `json:"finish_reason"`
}

type reply struct {
	Choices []choice `json:"choices"`
	Data    []struct {
		Index     int       `json:"index"`
		Embedding []float32 `json:"embedding"`
	} `json:"data"`
	Usage struct {
		TotalTokens int `json:"total_tokens"`
	} `json:"usage"`
	Error *struct {
		Message string `json:"message"`
		Type    string `json:"type"`
		Code    string `json:"code"`
	} `json:"error"`
}

var question = []message{{Role: "user", Content: "What is the capital of France?"}}

func check(good bool, format string, values ...any) {
	if !good {
		log.Fatalf(format, values...)
	}
}

func post(url string, body request) *http.Response {
	encoded, err := json.Marshal(body)
	check(err == nil, "%v", err)
	answer, err := http.Post(url, "application/json", bytes.NewReader(encoded))
	check(err == nil, "%v", err)
	return answer
}

func read(answer *http.Response) reply {
	defer answer.Body.Close()
	var found reply
	err := json.NewDecoder(answer.Body).Decode(&found)
	check(err == nil, "the reply is not JSON: %v", err)
	return found
}

func chat(url string) string {
	answer := post(url, request{Model: "smollm2", Messages: question, MaxTokens: 32})
	check(answer.StatusCode == 200, "chat: status %d", answer.StatusCode)
	found := read(answer)
	check(len(found.Choices) == 1 && found.Choices[0].FinishReason == "stop", "chat: %+v", found)
	check(found.Usage.TotalTokens > 0, "chat: no usage")
	return found.Choices[0].Message.Content
}

func stream(url string) string {
	answer := post(url, request{Model: "smollm2", Messages: question, MaxTokens: 32, Stream: true})
	defer answer.Body.Close()
	check(strings.HasPrefix(answer.Header.Get("Content-Type"), "text/event-stream"), "stream: %v", answer.Header)
	var text strings.Builder
	var reason string
	lines := bufio.NewScanner(answer.Body)
	for lines.Scan() {
		line := lines.Text()
		data := strings.TrimPrefix(line, "data: ")
		if data == line {
			continue
		}
		if data == "[DONE]" {
			check(reason == "stop", "stream: finish_reason %q", reason)
			rest, err := io.ReadAll(answer.Body)
			check(err == nil && len(bytes.TrimSpace(rest)) == 0, "stream: %q after its end, %v", rest, err)
			return text.String()
		}
		var chunk reply
		err := json.Unmarshal([]byte(data), &chunk)
		check(err == nil && chunk.Error == nil, "stream: %q: %v", data, err)
		for _, part := range chunk.Choices {
			text.WriteString(part.Delta.Content)
			reason = part.FinishReason
		}
	}
	log.Fatalf("stream: it ended without [DONE]: %v", lines.Err())
	return ""
}

func embed(url string) {
	found := read(post(url, request{Model: "all-minilm", Input: []string{"a text", "another", "a text"}}))
	check(len(found.Data) == 3, "embeddings: %+v", found.Error)
	for index, row := range found.Data {
		check(row.Index == index && len(row.Embedding) == 384, "embeddings: row %d has index %d", index, row.Index)
	}
	first, second, again := found.Data[0].Embedding, found.Data[1].Embedding, found.Data[2].Embedding
	check(cosine(first, again) > 0.999 && cosine(first, second) < 0.99, "embeddings: the vectors are in another order")
}

func cosine(one, other []float32) float64 {
	// The vectors have length 1.
	var sum float64
	for index := range one {
		sum += float64(one[index]) * float64(other[index])
	}
	return sum
}

func refusals(url string) {
	for status, body := range map[int]request{
		404: {Model: "no-such-model", Messages: question},
		400: {Model: "smollm2"},
	} {
		answer := post(url, body)
		check(answer.StatusCode == status, "refused with %d, not %d", answer.StatusCode, status)
		found := read(answer)
		check(found.Error != nil && found.Error.Message != "", "%d: %+v", status, found.Error)
		check(found.Error.Type != "" && found.Error.Code != "", "%d: %+v", status, found.Error)
	}
}

func main() {
	url := os.Args[1] + "/v1"
	whole := chat(url + "/chat/completions")
	check(strings.Contains(whole, "Paris"), "chat: %q", whole)
	streamed := stream(url + "/chat/completions")
	check(streamed == whole, "stream: %q, and whole %q", streamed, whole)
	embed(url + "/embeddings")
	refusals(url + "/chat/completions")
	fmt.Println("all as expected")
}
