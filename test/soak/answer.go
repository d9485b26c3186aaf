package soak

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// errGarbage is an answer that is no JSON where JSON is due. Only an engine
// told to send garbage may be its cause.
var errGarbage = errors.New("the answer is garbage")

// errWrong is an answer that looks right and is not.
var errWrong = errors.New("the answer is wrong")

// errTold is a stream whose last event says that it broke off.
var errTold = errors.New("the stream told an error")

// part is the union of what whole answers and events hold.
type part struct {
	Choices []struct {
		Index   int
		Text    string
		Message *struct{ Content string }
		Delta   *struct{ Content string }
	}
	Data   []struct{ Embedding json.RawMessage }
	Output []struct{ Content []struct{ Text string } }
	Usage  *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Input      int `json:"input_tokens"`
		Output     int `json:"output_tokens"`
	}
	Type     string
	Delta    json.RawMessage
	Response *part
	Error    *struct{ Message, Code, Type any }
}

// whole checks an answer that is one JSON object.
func (a *ask) whole(r io.Reader) error {
	body, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	var p part
	if json.Unmarshal(body, &p) != nil {
		return fmt.Errorf("%w: %.80q", errGarbage, body)
	}
	var got strings.Builder
	for _, c := range p.Choices {
		got.WriteString(c.Text)
		if c.Message != nil {
			got.WriteString(c.Message.Content)
		}
	}
	for _, o := range p.Output {
		for _, c := range o.Content {
			got.WriteString(c.Text)
		}
	}
	for _, d := range p.Data {
		var vector []float32
		if json.Unmarshal(d.Embedding, &vector) == nil {
			got.WriteString(base64Of(vector))
		} else {
			got.WriteString(strings.Trim(string(d.Embedding), `"`))
		}
	}
	if got.String() != a.want {
		return fmt.Errorf("%w: %.60q, want %.60q", errWrong, got.String(), a.want)
	}
	return a.counted(&p, true)
}

// counted compares the usage of an answer.
func (a *ask) counted(p *part, due bool) error {
	u := p.Usage
	switch {
	case !due && u != nil:
		return fmt.Errorf("%w: usage that was not asked for", errWrong)
	case !due:
		return nil
	case u == nil:
		return fmt.Errorf("%w: no usage", errWrong)
	case u.Prompt+u.Input != a.prompt || u.Completion+u.Output != a.tokens:
		return fmt.Errorf("%w: usage %+v, want %d and %d", errWrong, *u, a.prompt, a.tokens)
	}
	return nil
}

// streamed checks an event stream as it comes. The text so far must always
// begin the text that is due.
func (a *ask) streamed(r io.Reader) error {
	lines := bufio.NewReaderSize(r, 64<<10)
	var got strings.Builder
	sawUsage, done := false, false
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF { //nolint:errorlint // only a bare EOF is a clean end
			break
		}
		if err != nil {
			return err
		}
		data, ok := bytes.CutPrefix(bytes.TrimRight(line, "\r\n"), []byte("data: "))
		if !ok {
			continue
		}
		if done {
			return fmt.Errorf("%w: %.60q behind the end", errWrong, data)
		}
		if string(data) == "[DONE]" {
			done = true
			continue
		}
		var p part
		if json.Unmarshal(data, &p) != nil {
			return fmt.Errorf("%w: %.80q", errGarbage, data)
		}
		if p.Error != nil {
			_, err := io.Copy(io.Discard, lines)
			return fmt.Errorf("%w: %v: %w", errTold, p.Error.Code, errors.Join(err))
		}
		ended, err := a.event(&p, &got, &sawUsage)
		if err != nil {
			return err
		}
		done = done || ended
	}
	switch {
	case !done:
		return fmt.Errorf("%w: a clean end without its terminator after %d of %d bytes", errWrong, got.Len(), len(a.want))
	case got.String() != a.want:
		return fmt.Errorf("%w: %d of %d bytes, and then its end", errWrong, got.Len(), len(a.want))
	case a.kind != kindResponse && a.usage && !sawUsage:
		return fmt.Errorf("%w: no usage chunk", errWrong)
	}
	return nil
}

// event takes one event; ended is for streams whose end is an event.
func (a *ask) event(p *part, got *strings.Builder, sawUsage *bool) (ended bool, err error) {
	for _, c := range p.Choices {
		got.WriteString(c.Text)
		if c.Delta != nil {
			got.WriteString(c.Delta.Content)
		}
	}
	if p.Type == "response.output_text.delta" {
		var delta string
		_ = json.Unmarshal(p.Delta, &delta) // not a string: the text will differ
		got.WriteString(delta)
	}
	if !strings.HasPrefix(a.want, got.String()) {
		return false, fmt.Errorf("%w: %d bytes that do not begin the text", errWrong, got.Len())
	}
	if p.Response != nil && (p.Type == "response.completed" || p.Type == "response.incomplete") {
		return true, a.counted(p.Response, true)
	}
	if a.kind == kindResponse {
		return false, nil
	}
	if p.Usage != nil {
		*sawUsage = true
		return false, a.counted(p, a.usage)
	}
	return false, nil
}
