package router

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/router/proxy"
)

// What follows says with encoding/json alone what must become of a body sent to
// /v1/chat/completions of a router that serves the models m and n as "served".
// The router itself never decodes one.

// member is one member of an object, with the place of its value.
type member struct {
	key      string
	off, end int
	value    []byte
}

// membersOf lists the members of the object body[from:to], false where it is none.
func membersOf(body []byte, from, to int) (list []member, open int, ok bool) {
	d := json.NewDecoder(bytes.NewReader(body[from:to]))
	t, err := d.Token()
	if err != nil || t != json.Delim('{') {
		return nil, 0, false
	}
	open = from + int(d.InputOffset())
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, 0, false
		}
		var raw json.RawMessage
		if d.Decode(&raw) != nil {
			return nil, 0, false
		}
		end := from + int(d.InputOffset())
		list = append(list, member{key.(string), end - len(raw), end, raw})
	}
	return list, open, true
}

// last is the member that counts of those with a name.
func last(list []member, key string) (m member, count int) {
	for _, x := range list {
		if x.key == key {
			m, count = x, count+1
		}
	}
	return m, count
}

// depthOf is how deep arrays and objects are nested in a valid value.
func depthOf(body []byte) (deepest int) {
	depth, inString := 0, false
	for i := 0; i < len(body); i++ {
		switch c := body[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case !inString && (c == '{' || c == '['):
			depth++
			deepest = max(deepest, depth)
		case !inString && (c == '}' || c == ']'):
			depth--
		}
	}
	return deepest
}

// expect gives the verdict on a body and, where it is passed on, what the
// engine must get. It knows the four splices and nothing else.
func expect(body []byte) (verdict, []byte) {
	if len(body) > hostileBodyLimit || !json.Valid(body) || depthOf(body) > proxy.MaxDepth {
		return mustRefuse, nil
	}
	list, open, ok := membersOf(body, 0, len(body))
	if !ok {
		return mustRefuse, nil
	}
	model, count := last(list, "model")
	var name string
	if count != 1 || model.value[0] != '"' || json.Unmarshal(model.value, &name) != nil || name != "m" && name != "n" {
		return mustRefuse, nil
	}
	if slices.ContainsFunc(list, func(x member) bool { return x.key != "model" && strings.EqualFold(x.key, "model") }) {
		return mustRefuse, nil // encoding/json itself would take it for the model
	}
	type edit struct {
		off, end int
		text     string
	}
	edits := []edit{{model.off, model.end, `"served"`}}
	if stream, _ := last(list, "stream"); string(stream.value) == "true" {
		options, count := last(list, "stream_options")
		inner, innerOpen, isObject := membersOf(body, options.off, options.end)
		usage, have := last(inner, "include_usage")
		switch {
		case count == 0:
			edits = append(edits, edit{open, open, `"stream_options":{"include_usage":true},`})
		case string(options.value) == "null":
			edits = append(edits, edit{options.off, options.end, `{"include_usage":true}`})
		case !isObject || string(usage.value) == "true":
		case have > 0:
			edits = append(edits, edit{usage.off, usage.end, "true"})
		case len(inner) > 0:
			edits = append(edits, edit{innerOpen, innerOpen, `"include_usage":true,`})
		default:
			edits = append(edits, edit{innerOpen, innerOpen, `"include_usage":true`})
		}
	}
	slices.SortFunc(edits, func(a, b edit) int { return a.off - b.off })
	var out []byte
	pos := 0
	for _, e := range edits {
		out = append(append(out, body[pos:e.off]...), e.text...)
		pos = e.end
	}
	return mustPass, append(out, body[pos:]...)
}

// sameMeaning says whether Go's decoder reads the engine's body as the
// client's, but for the model and the usage option.
func sameMeaning(client, engine []byte) bool {
	decode := func(b []byte) (m map[string]any) {
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber()
		if d.Decode(&m) != nil {
			return nil
		}
		return m
	}
	a, b := decode(client), decode(engine)
	if a == nil || b == nil || b["model"] != "served" {
		return false
	}
	var typed struct{ Model string } // a Go engine's view: names match whatever their case
	if json.Unmarshal(engine, &typed) != nil || typed.Model != "served" {
		return false
	}
	for _, name := range []string{"model", "stream_options"} {
		delete(a, name)
		delete(b, name)
	}
	return reflect.DeepEqual(a, b)
}

func TestBodiesThatReadersTakeInTwoWaysAreRefusedOrReadAlikeByThemAndTheRouter(t *testing.T) {
	t.Parallel()
	// python is what json.loads of CPython 3.11 makes of the body as it is sent:
	// the model, "" where it refuses the text. goes is what the router does.
	for _, c := range []struct {
		body, python string
		goes         verdict
	}{
		{`{"model":"m"}`, "m", mustPass},
		{`{"model":"n","x":1e400}`, "n", mustPass},                                                 // inf to Python, refused by Go's float64
		{`{"model":"m","x":123456789012345678901234567890}`, "m", mustPass},                        // exact in Python
		{"{\"model\":\"m\",\"x\":\"\\ud800\"}", "m", mustPass},                                     // a lone surrogate: kept by Python, U+FFFD to Go
		{`{"x":{"model":"n"},"model":"m"}`, "m", mustPass},                                         // only the outermost counts
		{`{"\u006dodel":"m"}`, "m", mustPass},                                                      // an escape in the name
		{`{"model":"\u006d"}`, "m", mustPass},                                                      // and in the value
		{`{"model":"m","seed":1,"seed":2}`, "m", mustPass},                                         // another name twice: the last counts for both
		{`{"model":"m","model":"n"}`, "n", mustRefuse},                                             // Python and Go: the last; others: an error
		{`{"model":"m","\u006dodel":"n"}`, "n", mustRefuse},                                        // the same, hidden
		{`{"model":"m","Model":"n"}`, "m", mustRefuse},                                             // Go: n
		{`{"MODEL":"m"}`, "", mustRefuse},                                                          // Go: m
		{`{"model":null}`, "", mustRefuse},                                                         // no model, or a default one
		{`{"model":NaN}`, "", mustRefuse},                                                          // Python takes NaN, Go refuses it
		{`{"model":"m","x":NaN}`, "m", mustRefuse},                                                 // the same elsewhere
		{`{"model":"m","x":-Infinity}`, "m", mustRefuse},                                           // and the other words of its own
		{"\xef\xbb\xbf" + `{"model":"m"}`, "m", mustRefuse},                                        // a byte order mark: Python skips it in bytes
		{"{\x00\"\x00m\x00o\x00d\x00e\x00l\x00\"\x00:\x00\"\x00m\x00\"\x00}\x00", "m", mustRefuse}, // UTF-16 that Python guesses
		{"{\"model\":\"m\",\"x\":\"\xff\"}", "", mustPass},                                         // not UTF-8: Python refuses, Go replaces; the engine judges
		{"{\"model\":\"m\xff\"}", "", mustRefuse},                                                  // no model has that name
		{`{"model":"m",}`, "", mustRefuse},
		{`{"model":"m"} {}`, "", mustRefuse},
		{`{'model':'m'}`, "", mustRefuse},
		{`{"model":"m","x":01}`, "", mustRefuse},
		{`{"model":"m","x":+1}`, "", mustRefuse},
		{"{\"model\":\"m\",\"x\":\"\t\"}", "", mustRefuse}, // a control character in a string
		{`{"model":"m"/**/}`, "", mustRefuse},
	} {
		got, engine := expect([]byte(c.body))
		if got != c.goes {
			t.Errorf("%q has the verdict %d, want %d", c.body, got, c.goes)
		}
		if got != mustPass || c.python == "" {
			continue
		}
		list, _, _ := membersOf([]byte(c.body), 0, len(c.body))
		var model string
		if m, _ := last(list, "model"); json.Unmarshal(m.value, &model) != nil || model != c.python {
			t.Errorf("%q goes by the model %q, which Python reads as %q", c.body, model, c.python)
		}
		if !sameMeaning([]byte(c.body), engine) {
			t.Errorf("%q goes on as %q, which Go reads otherwise", c.body, engine)
		}
	}
}
