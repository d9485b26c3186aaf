package cli

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/hearth-dev/hearth/nodeagent"
)

func TestTheKubeletsFoldersAreTheControlRolesAlone(t *testing.T) {
	t.Parallel()
	c := nodeagent.Default()
	c.Kubernetes.Enabled, c.Kubernetes.Devices = true, []string{"weights"}
	c.Kubernetes.RegistrarDir = filepath.Join(t.TempDir(), "absent")
	for role, want := range map[string]bool{nodeagent.RoleControl: true, nodeagent.RoleData: false} {
		c.Roles = []string{role}
		if got := strings.Contains(strings.Join(kubernetesAdvice(&c), "\n"), "kubernetes.registrarDir"); got != want {
			t.Errorf("role %s is told of a missing registrarDir: %t", role, got)
		}
	}
}
