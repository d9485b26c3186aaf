package rig

import (
	"context"
	"fmt"
	"net/http"
	"os"

	"github.com/hearth-dev/hearth/configfile"
)

// writeConfig writes a component's configuration as a user would.
func writeConfig(path, kind string, cfg any) error {
	text, err := configfile.Marshal(cfg)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	head := fmt.Sprintf("apiVersion: %s\nkind: %s\n", configfile.APIVersion, kind)
	if err := os.WriteFile(path, append([]byte(head), text...), 0o600); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// Answers reports whether GET url gives 200.
func Answers(ctx context.Context, url string) (bool, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return false, fmt.Errorf("GET %s: %s", url, resp.Status)
	}
	return true, nil
}
