// Command model-runner pulls a repository as Docker's model runner does:
// it lists the tree level by level, gets each file by branch, and asks what the
// branch is last. The tests of test/outside call it. Arguments: base URL of the
// hub, repository, revision, folder for the files.
//
// It prints one JSON object: {"id": digest of the artifact} or {"error": text}.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

	"github.com/docker/model-runner/pkg/distribution/huggingface"
)

func main() {
	out := map[string]string{}
	if id, err := pull(context.Background(), os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		out["error"] = err.Error()
	} else {
		out["id"] = id
	}
	if err := json.NewEncoder(os.Stdout).Encode(out); err != nil {
		os.Exit(1)
	}
}

func pull(ctx context.Context, base, repo, revision, dir string) (string, error) {
	client := huggingface.NewClient(huggingface.WithBaseURL(base), huggingface.WithToken(os.Getenv("HF_TOKEN")))
	model, err := huggingface.BuildModel(ctx, client, repo, revision, "", dir, nil)
	if err != nil {
		return "", err
	}
	id, err := model.ID()
	if err != nil {
		return "", fmt.Errorf("name artifact: %w", err)
	}
	return id, nil
}
