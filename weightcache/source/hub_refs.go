package source

import (
	"context"
	"fmt"
	"strings"

	"github.com/hearth-dev/hearth/weightcache/artifact"
)

// maxRefs bounds the names that are read of one repository.
const maxRefs = 10_000

// Refs asks what kinds of names the revisions of a repository are: it maps a
// branch or tag to its full name ("refs/heads/main", "refs/tags/v1"). Where a
// tag has a branch's name the branch counts, as it does for the hub. Errors are
// those of Resolve.
func (h *Hub) Refs(ctx context.Context, repo string) (map[string]string, error) {
	ref := artifact.Ref{Scheme: artifact.SchemeHub, Name: repo, Revision: artifact.DefaultRevision}
	what := describe(ref, "")
	if _, err := artifact.ParseRef(ref.String()); err != nil {
		return nil, h.refuse("refs", what, fmt.Errorf("%w: %w", ErrNotFound, err))
	}
	type named struct {
		Name string `json:"name"`
		Ref  string `json:"ref"`
	}
	var said struct {
		Branches, Tags, Converts []named
	}
	if _, err := h.getJSON(ctx, what, h.address("api/models/"+escapePath(repo)+"/refs"), maxPageBytes, &said); err != nil {
		return nil, err
	}
	refs := map[string]string{}
	for _, list := range [][]named{said.Tags, said.Converts, said.Branches} {
		for _, n := range list {
			if n.Name != "" && strings.HasPrefix(n.Ref, "refs/") && len(refs) < maxRefs {
				refs[n.Name] = n.Ref
			}
		}
	}
	return refs, nil
}
