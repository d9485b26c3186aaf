package nodeagent_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
)

func TestWhatAConfiguredEngineServesCannotBeRemoved(t *testing.T) {
	t.Parallel()
	_, url := newOrigin(t)
	c := newConfig(t, url)
	c.Models = []string{ref}
	c.Endpoints = []nodeagent.Endpoint{{Name: "engine-0", URL: "http://127.0.0.1:1", Engine: "vllm", Pool: "p", Ref: ref}}
	r := run(t, c)
	if _, err := r.client.Pull(t.Context(), admin.PullRequest{Ref: ref}, func(admin.Progress) {}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		_, leases := get(t, "http://"+r.Listeners()["admin"]+"/v1/leases")
		if strings.Contains(leases, `"holders":["endpoint engine-0"]`) {
			break
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("leases %s lack the endpoint", leases)
		}
	}
	var refusal *admin.Error
	if err := r.client.Remove(ctx, ref); !errors.As(err, &refusal) || refusal.Code != admin.CodeLeased {
		t.Errorf("Remove gave %v, want a refusal with code %s", err, admin.CodeLeased)
	}
}
