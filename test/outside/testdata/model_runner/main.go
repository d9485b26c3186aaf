// Command model-runner pulls a repository as Docker's model runner does:
// it lists the tree level by level, gets each file by branch, and asks what the
// branch is last. The tests of test/outside call it. Arguments: base URL of the
// hub, repository, revision, folder for the files.
//
// It prints one JSON object: {"id": digest of the artifact, "created": its date}
// or {"error": text}. The digest holds the times of files in the folder.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/docker/model-runner/pkg/distribution/huggingface"
)

func main() {
	out := map[string]string{}
	if id, created, err := pull(context.Background(), os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		out["error"] = err.Error()
	} else {
		out["id"], out["created"] = id, created
	}
	if err := json.NewEncoder(os.Stdout).Encode(out); err != nil {
		os.Exit(1)
	}
}

func pull(ctx context.Context, base, repo, revision, dir string) (id, created string, err error) {
	client := huggingface.NewClient(huggingface.WithBaseURL(base), huggingface.WithToken(os.Getenv("HF_TOKEN")))
	model, err := huggingface.BuildModel(ctx, client, repo, revision, "", dir, nil)
	if err != nil {
		return "", "", err
	}
	if id, err = model.ID(); err != nil {
		return "", "", fmt.Errorf("name artifact: %w", err)
	}
	about, err := model.Descriptor()
	if err != nil || about.Created == nil {
		return "", "", fmt.Errorf("date artifact: %w", err)
	}
	return id, about.Created.UTC().Format(time.RFC3339Nano), nil
}
