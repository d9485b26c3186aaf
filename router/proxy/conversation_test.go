package proxy

import (
	"slices"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/router/pick"
)

func inspected(t *testing.T, body string) pick.Request {
	t.Helper()
	var req pick.Request
	if err := Inspect([]byte(body), &req); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
	return req
}

func TestTheTurnsOfAConversationShareItsNameAndOthersDoNot(t *testing.T) {
	t.Parallel()
	const system = `{"role":"system","content":"You are helpful."}`
	chatOf := func(messages ...string) uint64 {
		return inspected(t, `{"model":"m","messages":[`+strings.Join(messages, ",")+`]}`).Conversation
	}
	user := func(s string) string { return `{"role":"user","content":"` + s + `"}` }
	first := chatOf(system, user("a"))
	if first == 0 || chatOf(system, user("a"), `{"role":"assistant","content":"b"}`, user("c")) != first ||
		chatOf(system, `{"content" : "a", "role": "user"}`) != first {
		t.Error("the turns of a conversation have several names")
	}
	long := user(strings.Repeat("x", 1000))
	seen := []uint64{0}
	for i, name := range []uint64{first, chatOf(system, user("b")), chatOf(user("a")), chatOf(long), chatOf(user(strings.Repeat("x", 1001)))} {
		if slices.Contains(seen, name) {
			t.Errorf("conversation %d has another's name", i)
		}
		seen = append(seen, name)
	}
	for _, body := range []string{`{"model":"m","prompt":"a"}`, `{"model":"m","input":"a"}`, `{"model":"m","messages":[` + system + `]}`} {
		if got := inspected(t, body).Conversation; got != 0 {
			t.Errorf("%s is of the conversation %x", body, got)
		}
	}
}

func TestAdaptersNamedBesideTheModelShareNoKeys(t *testing.T) {
	t.Parallel()
	text := `"prompt":"` + strings.Repeat("x", 600) + `"`
	plain := inspected(t, `{"model":"m",`+text+`}`).Keys
	if null := inspected(t, `{"model":"m","lora_path":null,`+text+`}`).Keys; len(plain) != 2 || !slices.Equal(null, plain) {
		t.Errorf("keys %x without an adapter, %x with none", plain, null)
	}
	one := inspected(t, `{"model":"m",`+text+`,"lora_path":"a"}`).Keys
	two := inspected(t, `{"model":"m","lora":[{"id":0,"scale":0.5}],`+text+`}`).Keys
	if plain[0] == one[0] || one[0] == two[0] || plain[0] == two[0] {
		t.Errorf("keys %x, %x and %x", plain, one, two)
	}
}
