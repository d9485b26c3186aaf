package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"
)

func TestScanFindsWhatTheRouterNeeds(t *testing.T) {
	t.Parallel()
	body := []byte(`{"messages":[{"role":"user","content":"a \"model\": \"x\""}],` +
		`"\u006dodel" : "na\u006de","stream":true,"stream_options":{"include_usage":false},"max_tokens":7,"max_completion_tokens":9e0,` +
		`"tools":[{}],"seed":123456789012345678901234567890}`)
	var f facts
	if err := scan(body, &f); err != nil {
		t.Fatal(err)
	}
	if text(body, f.model) != "name" || !f.stream || f.wantsUsage || f.maxTokens != 9 || !f.messages.present() {
		t.Fatalf("facts %+v, model %q", f, text(body, f.model))
	}
}

func TestScanRefusesWhatAnEngineCouldReadInTwoWays(t *testing.T) {
	t.Parallel()
	deep := strings.Repeat("[", MaxDepth+1) + strings.Repeat("]", MaxDepth+1)
	for body, want := range map[string]error{
		`{"model":"a","model":"b"}`:       ErrDuplicateModel,
		`{"model":"a","\u006dodel":"b"}`:  ErrDuplicateModel,
		`{"model":7}`:                     ErrModelType,
		`[1]`:                             ErrNotObject,
		``:                                ErrMalformed,
		`{"a":1`:                          ErrMalformed,
		`{"a":1}x`:                        ErrMalformed,
		`{"a":01}`:                        ErrMalformed,
		`{"a":"` + "\n" + `"}`:            ErrMalformed,
		`{"a":"\x"}`:                      ErrMalformed,
		`{"a":` + deep + `}`:              ErrTooDeep,
		`{"stream_options":{"a":nul}}`:    ErrMalformed,
		`{"stream_options":{"a":1},}`:     ErrMalformed,
		"{\"a\":1}\u00a0":                 ErrMalformed,
		`{"a":1e}`:                        ErrMalformed,
		`{'a':1}`:                         ErrMalformed,
		`{"a":tru}`:                       ErrMalformed,
		`{"model":"m","stream_options":[`: ErrMalformed,
	} {
		var f facts
		if err := scan([]byte(body), &f); !errors.Is(err, want) {
			t.Errorf("scan(%.60s) = %v, want %v", body, err, want)
		}
	}
}

// apply gives the body as the engine gets it.
func apply(t *testing.T, body string, served string, continuous bool) (string, bool, bool) {
	t.Helper()
	var f facts
	if err := scan([]byte(body), &f); err != nil {
		t.Fatalf("scan(%s): %v", body, err)
	}
	list, strip, cut := f.edits([]byte(body), served, false, true, continuous)
	got := bytes.Join(splice(nil, []byte(body), list), nil)
	if !json.Valid(got) {
		t.Fatalf("splices made %s", got)
	}
	return string(got), strip, cut
}

func TestSplicesTouchOnlyTheModelAndTheUsageOption(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		body, want string
		continuous bool
		strip, cut bool
	}{
		{`{"model":"m"}`, `{"model":"s\"x"}`, false, false, false},
		{`{"model":"m","stream":true}`, `{"stream_options":{"include_usage":true},"model":"s\"x","stream":true}`, false, true, false},
		{`{ "stream": true ,"stream_options" :null}`, `{ "stream": true ,"stream_options" :{"include_usage":true}}`, false, true, false},
		{`{"stream":true,"stream_options":{}}`, `{"stream":true,"stream_options":{"include_usage":true}}`, false, true, false},
		{`{"stream":true,"stream_options":{"a":1}}`, `{"stream":true,"stream_options":{"include_usage":true,"a":1}}`, false, true, false},
		{`{"stream":true,"stream_options":{"include_usage":false}}`, `{"stream":true,"stream_options":{"include_usage":true}}`, false, true, false},
		{`{"stream":true,"stream_options":{"include_usage":true}}`, `{"stream":true,"stream_options":{"include_usage":true}}`, false, false, false},
		{`{"stream":true,"stream_options":{"include_usage":true}}`, `{"stream":true,"stream_options":{"continuous_usage_stats":true,"include_usage":true}}`, true, false, true},
		{`{"stream":true}`, `{"stream_options":{"include_usage":true,"continuous_usage_stats":true},"stream":true}`, true, true, true},
		{`{"stream":true,"stream_options":7}`, `{"stream":true,"stream_options":7}`, false, false, false},
		{`{"stream":false,"x":1.50}`, `{"stream":false,"x":1.50}`, false, false, false},
	} {
		got, strip, cut := apply(t, c.body, `s"x`, c.continuous)
		if got != c.want || strip != c.strip || cut != c.cut {
			t.Errorf("%s became %s (strip %v, cut %v), want %s (%v, %v)", c.body, got, strip, cut, c.want, c.strip, c.cut)
		}
	}
}

func keysOf(t *testing.T, body string) []uint64 {
	t.Helper()
	var f facts
	if err := scan([]byte(body), &f); err != nil {
		t.Fatal(err)
	}
	var w walker
	w.run([]byte(body), &f)
	return w.keys
}

func TestALaterTurnExtendsTheKeysOfTheEarlier(t *testing.T) {
	t.Parallel()
	say := func(role string, n int) string {
		return `{"role":"` + role + `","content":"` + strings.Repeat(role+" said something. ", n) + `"}`
	}
	first := keysOf(t, `{"model":"m","messages":[`+say("system", 30)+`,`+say("user", 40)+`],"tools":[{"type":"function"}]}`)
	second := keysOf(t, `{"tools": [ {"type" : "function"} ],"messages":[`+say("system", 30)+`, `+say("user", 40)+`,`+say("assistant", 20)+`,`+say("user", 9)+`],"model":"m"}`)
	if len(first) < 3 || len(second) <= len(first) {
		t.Fatalf("%d and %d keys", len(first), len(second))
	}
	for i, key := range first {
		if second[i] != key {
			t.Fatalf("key %d of %d differs", i, len(first))
		}
	}
}

func TestKeysSeparateSaltsAndToolsAndIgnoreTheFormOfText(t *testing.T) {
	t.Parallel()
	words := strings.Repeat("word ", 100)
	plain := keysOf(t, `{"messages":[{"role":"user","content":"`+words+`"}]}`)
	parts := keysOf(t, `{"messages":[{"content":[{"type":"text","text":"`+words+`"}],"role":"user"}]}`)
	salted := keysOf(t, `{"cache_salt":"a","messages":[{"role":"user","content":"`+words+`"}]}`)
	tools := keysOf(t, `{"tools":[1],"messages":[{"role":"user","content":"`+words+`"}]}`)
	if len(plain) != 1 || plain[0] != parts[0] || plain[0] == salted[0] || plain[0] == tools[0] {
		t.Fatalf("plain %x, parts %x, salted %x, tools %x", plain, parts, salted, tools)
	}
}

func FuzzScan(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"model":"m","stream":true,"stream_options":{"include_usage":false,"continuous_usage_stats":1}}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"a\u00e9"},{"type":"image_url","image_url":{"url":"x"}}]}],"tools":[{}]}`,
		`{"input":[1,-0.5e+3,null,true,"\ud800"],"prompt":["a",[1,2]],"max_tokens":1e2}`, "{\"a\":\"\xff\"}", `[[[]]]`, `"\`, `{"a":{"b":[{}]}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var got facts
		err := scan(body, &got)
		switch {
		case errors.Is(err, ErrMalformed):
			if json.Valid(body) {
				t.Fatalf("refused valid JSON: %v", err)
			}
			return
		case errors.Is(err, ErrTooDeep), errors.Is(err, ErrDuplicateModel), errors.Is(err, ErrModelType), errors.Is(err, ErrModelSpelling):
			return
		case errors.Is(err, ErrNotObject):
			if !json.Valid(body) {
				t.Fatal("a broken body passed for another value")
			}
			return
		}
		if !json.Valid(body) {
			t.Fatal("accepted broken JSON")
		}
		var w walker
		w.run(body, &got)
		needs(body, &got, w.images)
		list, _, _ := got.edits(body, "served", true, true, true)
		spliced := bytes.Join(splice(nil, body, list), nil)
		if !json.Valid(spliced) {
			t.Fatalf("splices made %q of %q", spliced, body)
		}
		var again facts
		if err := scan(spliced, &again); err != nil {
			t.Fatalf("spliced body: %v", err)
		}
		if text(spliced, again.model) != "served" {
			t.Fatalf("model became %q", text(spliced, again.model))
		}
	})
}

func TestLongStringsAreFoundAgainWhereTheyStand(t *testing.T) {
	t.Parallel()
	long := strings.Repeat(`0123456789abcdef\n`, 40)
	body := []byte(`{"stream_options":{"x":"` + long + `","include_usage":true},"tools":["` + long + `"],"messages":[{"content":"` + long +
		`","role":"user"},{"role":"user","content":[{"type":"text","text":"` + long + `é"}]}],"instructions":"` + long + `","stream":true,"model":"m"}`)
	var f facts
	if err := scan(body, &f); err != nil {
		t.Fatal(err)
	}
	if len(f.long) != 5 {
		t.Fatalf("%d long strings", len(f.long))
	}
	var with, without walker
	with.run(body, &f)
	f.long = nil
	without.run(body, &f)
	if !slices.Equal(with.keys, without.keys) || len(with.keys) == 0 || with.counted != without.counted {
		t.Fatalf("%d keys and %d", len(with.keys), len(without.keys))
	}
}

func TestTheEstimateCountsTextAndNotHowJSONWritesIt(t *testing.T) {
	t.Parallel()
	const text = "\"k\u00e4se\"\n\\ <b>\u706b</b> \U0001f525\u007f\u07ff\u0800 end"
	ascii := []byte(`"`)
	for _, r := range utf16.Encode([]rune(text)) {
		ascii = fmt.Appendf(ascii, `\u%04X`, r)
	}
	ascii = append(ascii, '"')
	short, err := json.Marshal(text)
	if err != nil {
		t.Fatal(err)
	}
	for _, written := range [][]byte{ascii, short} {
		for form, want := range map[string]int{
			`{"model":"m","prompt":%s}`:                                                        len(text),
			`{"model":"m","prompt":[%[1]s,%[1]s , %[1]s]}`:                                     3 * len(text),
			`{"model":"m","prompt":[]}`:                                                        1,
			`{"model":"m","prompt":[1,22]}`:                                                    len(`[1,22`),
			`{"model":"m","input":%s}`:                                                         len(text),
			`{"model":"m","messages":[{"role":"user","content":%s}]}`:                          len("user" + text),
			`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":%s}]}]}`: len("user" + text),
		} {
			body := []byte(form)
			if strings.Contains(form, "%") {
				body = fmt.Appendf(nil, form, written)
			}
			var f facts
			if err := scan(body, &f); err != nil {
				t.Fatalf("%s: %v", body, err)
			}
			var w walker
			w.run(body, &f)
			if w.counted != want {
				t.Errorf("%s counts %d bytes, want %d", body, w.counted, want)
			}
		}
	}
}

func TestEveryByteThatEndsPlainTextIsSeenWhereverItStands(t *testing.T) {
	t.Parallel()
	for c := range 256 {
		for at := range 80 {
			s := bytes.Repeat([]byte{'~', ' ', '!', '#', '[', ']', 0x7f, 0x80, 0xff, 0xa2, 0xdc}, 10)[:80]
			s[at] = byte(c)
			body := append(append([]byte{'"'}, s...), '"', ' ')
			want := len(body) - 1
			switch {
			case c == '"':
				want = at + 2
			case c == '\\' || c < ' ':
				want = ^(at + 1)
				if c == '\\' {
					want = ^(at + 2)
				}
				if c == '\\' && at == 79 { // escapes the quote
					want = ^len(body)
				}
			}
			if got := skipString(body, 0); got != want {
				t.Fatalf("byte %#x at %d: %d, want %d", c, at, got, want)
			}
		}
	}
}
