//go:build outside

package outside

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/test/outside/rig"
	"github.com/hearth-dev/hearth/test/sim/hub"
)

func TestFastLlamaServerPullsByNameThroughTheMirrorAndRunsOnTheMountedView(t *testing.T) {
	t.Parallel()
	r, ctx := newRig(t)
	root := filepath.Join(r.Dir, "origin")
	if err := r.WriteGGUFRepo(root); err != nil {
		t.Fatal(err)
	}
	origin := hub.New(hub.Options{Dir: root})
	url, err := r.Serve(ctx, origin)
	if err != nil {
		t.Fatal(err)
	}
	node := startNode(ctx, t, r, rig.NodeOptions{Origin: url})

	cache := filepath.Join(r.Dir, "llama-cache")
	byName, err := r.StartLlama(ctx, rig.LlamaOptions{
		Name: "by-mirror", Source: []string{"-hf", rig.GGUFRepo},
		Env: []string{"HF_ENDPOINT=" + node.Mirror, "HF_HUB_CACHE=" + cache},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := sums(t, filepath.Dir(r.Deps.GGUF))[filepath.Base(r.Deps.GGUF)]
	snapshots, err := filepath.Glob(filepath.Join(cache, "models--*", "snapshots", "*"))
	if err != nil || len(snapshots) != 1 {
		t.Fatalf("llama-server made snapshots %v, %v", snapshots, err)
	}
	if got := sums(t, snapshots[0])[filepath.Base(r.Deps.GGUF)]; got != want {
		t.Errorf("llama-server has a model of sha256 %q, want %s", got, want)
	}
	st, err := os.Stat(r.Deps.GGUF)
	if err != nil {
		t.Fatal(err)
	}
	if got := origin.FileBytes(rig.GGUFRepo + "/" + filepath.Base(r.Deps.GGUF)); got != st.Size() {
		t.Errorf("the origin sent %d bytes of the model, want its %d once", got, st.Size())
	}

	before := origin.Bytes()
	view, err := node.HubView(ctx, "hub://"+rig.GGUFRepo)
	if err != nil {
		t.Fatal(err)
	}
	pod, err := r.NewPod(view)
	if err != nil {
		t.Fatal(err)
	}
	onView, err := r.StartLlama(ctx, rig.LlamaOptions{
		Name: "by-view", Source: []string{"-hf", rig.GGUFRepo, "--offline"}, Env: []string{"HF_HUB_CACHE=" + pod.View}, Pod: pod,
	})
	if err != nil {
		t.Fatal(err)
	}
	if more := origin.Bytes() - before; more != 0 {
		t.Errorf("an engine on the view cost the origin %d bytes", more)
	}
	prompt, err := json.Marshal(map[string]any{
		"temperature": 0, "max_tokens": 16, "messages": []map[string]string{{"role": "user", "content": "What is the capital of France?"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	var texts []string
	for _, l := range []*rig.Llama{byName, onView} {
		var answer struct {
			Choices []struct {
				Message struct{ Content string }
			}
		}
		if err := rig.PostJSON(ctx, l.URL+"/v1/chat/completions", string(prompt), &answer); err != nil {
			t.Fatal(err)
		}
		if len(answer.Choices) != 1 || strings.TrimSpace(answer.Choices[0].Message.Content) == "" {
			t.Fatalf("%s said %+v", l.Name, answer)
		}
		texts = append(texts, answer.Choices[0].Message.Content)
	}
	if texts[0] != texts[1] {
		t.Errorf("the same weights said %q and %q", texts[0], texts[1])
	}
}
