package nodeagent_test

import (
	"errors"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/credentials/insecure"

	"github.com/hearth-dev/hearth/dradriver/stock"
	"github.com/hearth-dev/hearth/nodeagent"
	"github.com/hearth-dev/hearth/nodeagent/admin"
	"github.com/hearth-dev/hearth/nodeagent/report"
	"github.com/hearth-dev/hearth/test/sim/hub"
	"github.com/hearth-dev/hearth/units"
	"github.com/hearth-dev/hearth/weightcache/artifact"
)

func mustRef(t *testing.T, text string) artifact.Ref {
	t.Helper()
	r, err := artifact.ParseRef(text)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// listeners are those of a role's process.
func listeners(t *testing.T, client *admin.Client) running {
	t.Helper()
	node, err := client.Node(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return running{client: client, addresses: node.Listeners}
}

// served is a configuration with one endpoint that serves the model.
func served(t *testing.T, url string) nodeagent.Config {
	t.Helper()
	c := newConfig(t, url)
	c.Endpoints = []nodeagent.Endpoint{{Name: "engine-0", URL: "http://127.0.0.1:1", Engine: "vllm", Pool: "p", Ref: ref}}
	return c
}

func (f *fabric) leased() bool {
	_, leases := get(f.t, "http://"+listeners(f.t, f.control).Listeners()["admin"]+"/v1/leases")
	return strings.Contains(leases, `"endpoint engine-0"`)
}

func TestTheRolesApartDoWhatTheyDoTogether(t *testing.T) {
	t.Parallel()
	_, url := newOrigin(t)
	f := newFabric(t, served(t, url))
	f.start(nodeagent.RoleControl) // before the data role: it waits for none
	if text := f.problems(); !strings.Contains(text, "the data role does not answer") {
		t.Errorf("problems before the data role is up: %q", text)
	}
	f.start(nodeagent.RoleData)
	f.until("the roles to meet", func() bool { return f.problems() == "" })

	lines := 0
	model, err := f.control.Pull(t.Context(), admin.PullRequest{Ref: ref}, func(admin.Progress) { lines++ })
	if err != nil || model.State != "Ready" || len(model.Views) != 2 || lines == 0 {
		t.Fatalf("pulled %+v in %d lines: %v", model, lines, err)
	}
	control := listeners(t, f.control)
	await(t, control, insecure.NewCredentials(), func(s *report.State) bool {
		return s.Artifact(ref).GetState() == report.ArtifactState_ARTIFACT_STATE_READY && s.Space().GetCapacityBytes() > 0
	})
	f.until("the endpoint's lease", f.leased)
	if err := f.control.Remove(t.Context(), ref); codeOf(err) != admin.CodeLeased {
		t.Errorf("Remove of what an engine reads gave %v", err)
	}
	if shown, err := f.control.Model(t.Context(), ref); err != nil || len(shown.FileList) == 0 {
		t.Errorf("show gave %+v, %v", shown, err)
	}
	if result, err := f.control.Verify(t.Context(), ref); err != nil || result.Files == 0 || len(result.Bad) != 0 {
		t.Errorf("verify gave %+v, %v", result, err)
	}
	if _, err := f.control.Inject(t.Context(), admin.InjectRequest{Device: "gpu-0", XID: 79}); err != nil {
		t.Errorf("inject gave %v", err)
	}
	if _, err := f.data.Inject(t.Context(), admin.InjectRequest{Device: "gpu-0", XID: 79}); codeOf(err) != admin.CodeInjectDisabled {
		t.Errorf("inject into the data role gave %v", err)
	}
	data := listeners(t, f.data)
	if status, _ := get(t, "http://"+data.Listeners()["mirror"]+"/org/tiny/resolve/main/config.json"); status != http.StatusOK {
		t.Errorf("the mirror gave %d", status)
	}
	for address, want := range map[string][]string{
		control.Listeners()["admin"]:  {"hearth_data_role_up 1", "hearth_report_sequence", "hearth_device_health"},
		data.Listeners()["dataAdmin"]: {"hearth_weights_model_state", "hearth_mirror_requests_total", "hearth_agent_info"},
	} {
		_, text := get(t, "http://"+address+"/metrics")
		for _, name := range want {
			if !strings.Contains(text, name) {
				t.Errorf("metrics of %s lack %s", address, name)
			}
		}
		if status, _ := get(t, "http://"+address+"/readyz"); status != http.StatusOK {
			t.Errorf("readyz of %s gave %d", address, status)
		}
	}
}

func TestWithTheDataRoleKilledReportsStandAndNothingWaitsForIt(t *testing.T) {
	t.Parallel()
	_, url := newOrigin(t)
	f := newFabric(t, served(t, url))
	f.config.KV.Memory, f.config.KV.NVMe = units.GiB, units.GiB
	f.start(nodeagent.RoleControl)
	data := f.start(nodeagent.RoleData)
	model, err := f.control.Pull(t.Context(), admin.PullRequest{Ref: ref}, nil)
	if err != nil {
		t.Fatal(err)
	}
	digest, err := artifact.ParseDigest(model.Digest)
	if err != nil {
		t.Fatal(err)
	}
	f.until("the model in the control role's state", func() bool {
		s, ok := f.remote.Snapshot()
		return ok && len(s.Models) == 1 && s.Models[0].State == "Ready"
	})
	views, err := f.remote.Cache().Hold(t.Context(), digest, "claim-1")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := f.remote.KV().Reserve(t.Context(), stock.Reservation{Claim: "claim-1", Namespace: "n", Memory: units.MiB})
	if err != nil {
		t.Fatal(err)
	}
	f.until("the endpoint's lease", f.leased)
	control := listeners(t, f.control)
	await(t, control, insecure.NewCredentials(), func(s *report.State) bool {
		return s.Artifact(ref).GetState() == report.ArtifactState_ARTIFACT_STATE_READY
	})

	data.kill()
	f.until("the control role to say so", func() bool { return strings.Contains(f.problems(), "the data role does not answer") })
	await(t, control, insecure.NewCredentials(), func(s *report.State) bool {
		return s.Artifact(ref).GetState() == report.ArtifactState_ARTIFACT_STATE_READY
	})
	if _, err := f.control.Inject(t.Context(), admin.InjectRequest{Device: "gpu-0", XID: 79}); err != nil {
		t.Errorf("inject gave %v", err)
	}
	await(t, control, insecure.NewCredentials(), func(s *report.State) bool {
		return s.Device("gpu-0").GetHealth() == report.Health_HEALTH_UNHEALTHY
	})
	if _, err := f.control.Pull(t.Context(), admin.PullRequest{Ref: ref}, nil); codeOf(err) != admin.CodeUnavailable {
		t.Errorf("pull gave %v, want code %s", err, admin.CodeUnavailable)
	}
	begun := time.Now()
	for _, err := range []error{f.remote.Cache().Release(t.Context(), "claim-1"), f.remote.KV().Release(t.Context(), "claim-1")} {
		if !errors.Is(err, stock.ErrUnavailable) {
			t.Errorf("release gave %v, want ErrUnavailable", err)
		}
	}
	if took := time.Since(begun); took > waitLimit/4 {
		t.Errorf("two releases took %v", took)
	}

	f.start(nodeagent.RoleData)
	f.until("the roles to meet again", func() bool { return f.problems() == "" })
	f.until("the endpoint's lease again", f.leased)
	if held, err := f.remote.Cache().Holds(t.Context()); err != nil || !slices.Equal(held, []string{"claim-1"}) {
		t.Errorf("after the kill %v hold something, %v", held, err)
	}
	if again, err := f.remote.Cache().Hold(t.Context(), digest, "claim-1"); err != nil || again != views {
		t.Errorf("after the kill the views are %+v, %v", again, err)
	}
	if again, err := f.remote.KV().Reserve(t.Context(), stock.Reservation{Claim: "claim-1", Namespace: "n", Memory: units.MiB}); err != nil || again != dir {
		t.Errorf("after the kill the directory is %q, %v", again, err)
	}
	if err := errors.Join(f.remote.Cache().Release(t.Context(), "claim-1"), f.remote.KV().Release(t.Context(), "claim-1")); err != nil {
		t.Error(err)
	}
}

func TestWithTheControlRoleKilledTheMirrorServesAndAClaimsPullGoesOn(t *testing.T) {
	t.Parallel()
	origin, url := newOrigin(t)
	release := make(chan struct{})
	origin.SetFault(func(r *http.Request) *hub.Fault {
		if strings.HasSuffix(r.URL.Path, ".safetensors") {
			return &hub.Fault{StallAfter: 1000, Release: release}
		}
		return nil
	})
	f := newFabric(t, served(t, url))
	control := f.start(nodeagent.RoleControl)
	f.start(nodeagent.RoleData)
	f.until("the roles to meet", func() bool { return f.problems() == "" })
	if _, err := f.remote.Cache().Pull(t.Context(), mustRef(t, ref), "claim-1"); err != nil {
		t.Fatal(err)
	}
	f.until("the pull to be under way", func() bool {
		m, err := f.data.Model(t.Context(), ref)
		return err == nil && m.State == "Filling"
	})
	control.kill()
	mirror := listeners(t, f.data).Listeners()["mirror"]
	if status, _ := get(t, "http://"+mirror+"/org/tiny/resolve/main/config.json"); status != http.StatusOK {
		t.Errorf("the mirror gave %d", status)
	}
	f.start(nodeagent.RoleControl)
	close(release)
	f.until("the pull to end", func() bool {
		m, err := f.control.Model(t.Context(), ref)
		return err == nil && m.State == "Ready"
	})
	p, err := f.remote.Cache().Pull(t.Context(), mustRef(t, ref), "claim-1")
	if err != nil || !p.Ready || p.Views.Flat == "" {
		t.Errorf("the claim sees %+v, %v", p, err)
	}
	f.until("the endpoint's lease", f.leased)
}

func TestAPullForAClaimGoesOnAfterTheDataRoleWasKilled(t *testing.T) {
	t.Parallel()
	origin, url := newOrigin(t)
	release := make(chan struct{})
	origin.SetFault(func(r *http.Request) *hub.Fault {
		if strings.HasSuffix(r.URL.Path, ".safetensors") {
			return &hub.Fault{StallAfter: 1000, Release: release}
		}
		return nil
	})
	f := newFabric(t, newConfig(t, url))
	data := f.start(nodeagent.RoleData)
	if _, err := f.remote.Cache().Pull(t.Context(), mustRef(t, ref), "claim-1"); err != nil {
		t.Fatal(err)
	}
	f.until("the pull to be under way", func() bool {
		m, err := f.data.Model(t.Context(), ref)
		return err == nil && m.State == "Filling"
	})
	data.kill()
	origin.SetFault(nil)
	close(release)
	f.start(nodeagent.RoleData)
	f.until("the pull to end without being asked for", func() bool {
		m, err := f.data.Model(t.Context(), ref)
		return err == nil && m.State == "Ready"
	})
	if err := f.data.Remove(t.Context(), ref); codeOf(err) != admin.CodeLeased {
		t.Errorf("Remove of what a claim waits for gave %v", err)
	}
}

func TestWhatAClaimHoldsIsNotEvictedByWhatIsPulledAtTheStart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for i, name := range []string{"tiny", "other"} {
		if err := hub.WriteModel(filepath.Join(dir, "org", name), hub.ModelOptions{Size: units.MiB, Shards: 2, Seed: uint64(i)}); err != nil {
			t.Fatal(err)
		}
	}
	c := newConfig(t, "http://unused.invalid")
	c.Sources = []nodeagent.Source{{Name: "folder", Type: nodeagent.SourceDir, Root: dir, Refs: []string{dir + "/**"}}}
	held, other := "dir://"+filepath.Join(dir, "org", "tiny"), "dir://"+filepath.Join(dir, "org", "other")
	f := newFabric(t, c)
	data := f.start(nodeagent.RoleData)
	model, err := f.data.Pull(t.Context(), admin.PullRequest{Ref: held}, nil)
	if err != nil {
		t.Fatal(err)
	}
	digest, err := artifact.ParseDigest(model.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.remote.Cache().Hold(t.Context(), digest, "claim-1"); err != nil {
		t.Fatal(err)
	}
	data.kill()
	f.config.Models = []string{other}
	f.config.Weights.Budget = units.Bytes(model.Size) + 64*units.KiB
	f.start(nodeagent.RoleData)
	f.until("the pull of the configured model to fail", func() bool {
		node, err := f.data.Node(t.Context())
		return err == nil && strings.Contains(strings.Join(node.Problems, " "), "no space")
	})
	if m, err := f.data.Model(t.Context(), held); err != nil || m.State != "Ready" {
		t.Errorf("the held model is %s, %v", m.State, err)
	}
	if err := f.remote.Cache().Release(t.Context(), "claim-1"); err != nil {
		t.Fatal(err)
	}
	f.until("the configured model to take its place", func() bool {
		m, err := f.data.Model(t.Context(), other)
		return err == nil && m.State == "Ready"
	})
}
