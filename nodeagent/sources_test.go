package nodeagent_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/credentials/insecure"

	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/units"
)

func TestEverySourceDialsThroughTheAgentsOneDialer(t *testing.T) {
	t.Parallel()
	_, first := newOrigin(t)
	_, second := newOrigin(t)
	c := newConfig(t, first)
	c.Sources[0].Refs = []string{"org/none"}
	c.Sources = append(c.Sources, nodeagent.Source{Name: "second", Type: nodeagent.SourceHub, URL: second, Refs: []string{"org/tiny"}})
	var mu sync.Mutex
	dialled := map[string]bool{}
	r := runWith(t, c, nodeagent.Options{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		mu.Lock()
		dialled["http://"+address] = true
		mu.Unlock()
		return new(net.Dialer).DialContext(ctx, network, address)
	}})
	if _, err := r.client.Pull(t.Context(), admin.PullRequest{Ref: ref}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := r.client.Pull(t.Context(), admin.PullRequest{Ref: "hub://org/none"}, nil); err == nil {
		t.Error("a repository that no origin has was pulled")
	}
	mu.Lock()
	defer mu.Unlock()
	if !dialled[first] || !dialled[second] {
		t.Errorf("dialled %v, want %s and %s", dialled, first, second)
	}
}

func TestAConfiguredModelBecomesReadyAfterAListingThatStalled(t *testing.T) {
	t.Parallel()
	origin, _ := newOrigin(t)
	var once sync.Once
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		stalls := false
		if strings.Contains(r.URL.Path, "/tree/") {
			once.Do(func() { stalls = true })
		}
		if stalls {
			_, _ = io.WriteString(w, "[")
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return
		}
		origin.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	c := newConfig(t, s.URL)
	c.Models = []string{ref}
	c.Weights.StallTimeout = units.Duration(time.Second)
	await(t, run(t, c), insecure.NewCredentials(), func(state *report.State) bool {
		return state.Artifact(ref).GetState() == report.ArtifactState_ARTIFACT_STATE_READY
	})
}
