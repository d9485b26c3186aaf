package fabric

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/hearth-dev/hearth/identity"
)

// certificates issues the fabric's own: one authority that lives as long as
// the fabric, and a pair for each process.
type certificates struct {
	dir string
	ca  *identity.CA
}

func newCertificates(dir string) (*certificates, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	ca, err := identity.NewCA(identity.Domain, 30*24*time.Hour)
	if err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	c := &certificates{dir: dir, ca: ca}
	if err := os.WriteFile(c.authority(), ca.Cert(), 0o600); err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	return c, nil
}

func (c *certificates) authority() string { return filepath.Join(c.dir, "ca.pem") }

// issue writes a pair for one process.
func (c *certificates) issue(role identity.Role, name string) (identity.Files, error) {
	files := identity.Files{
		Cert: filepath.Join(c.dir, name+".pem"), Key: filepath.Join(c.dir, name+"-key.pem"), CA: c.authority(),
	}
	pair, err := c.ca.Issue(role, name, identity.IssueOptions{})
	if err != nil {
		return files, fmt.Errorf("make certificate of %s: %w", name, err)
	}
	if err := identity.WritePair(files.Cert, files.Key, pair); err != nil {
		return files, fmt.Errorf("make certificate of %s: %w", name, err)
	}
	return files, nil
}
