package bench

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/rest"

	"github.com/hearth-dev/hearth/identity"
)

// sliceLabel marks every slice that the bench makes, so that all of them can be
// found and removed, those of a run that was killed too.
const sliceLabel = identity.Domain + "/bench"

// removeWithin bounds the removal of what the bench made.
const removeWithin = 2 * time.Minute

// traffic is requests to an API server.
type traffic struct{ reads, watches, dryRuns, writes int64 }

func (t traffic) all() int64 { return t.reads + t.watches + t.dryRuns + t.writes }

func (t traffic) since(before traffic) traffic {
	return traffic{t.reads - before.reads, t.watches - before.watches, t.dryRuns - before.dryRuns, t.writes - before.writes}
}

func (t traffic) String() string {
	return fmt.Sprintf("%d reads, %d watches, %d dry runs, %d writes", t.reads, t.watches, t.dryRuns, t.writes)
}

// counter counts the requests of a client, also those that it tries again.
type counter struct{ reads, watches, dryRuns, writes atomic.Int64 }

func (c *counter) now() traffic {
	return traffic{c.reads.Load(), c.watches.Load(), c.dryRuns.Load(), c.writes.Load()}
}

// counted gives a configuration whose requests are counted.
func counted(config *rest.Config) (*rest.Config, *counter) {
	c := &counter{}
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTrip(func(r *http.Request) (*http.Response, error) {
			query := r.URL.Query()
			switch {
			case query.Get("dryRun") != "":
				c.dryRuns.Add(1)
			case r.Method != http.MethodGet:
				c.writes.Add(1)
			case query.Get("watch") != "":
				c.watches.Add(1)
			default:
				c.reads.Add(1)
			}
			return next.RoundTrip(r)
		})
	})
	return config, c
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// markedClient is a client whose new slices have the bench's label and no owner:
// there is no such node, and a cluster removes what belongs to nobody.
type markedClient struct{ kubernetes.Interface }

// ResourceV1 implements kubernetes.Interface.
func (c markedClient) ResourceV1() resourceclient.ResourceV1Interface {
	return markedGroup{c.Interface.ResourceV1()}
}

type markedGroup struct {
	resourceclient.ResourceV1Interface
}

func (g markedGroup) ResourceSlices() resourceclient.ResourceSliceInterface {
	return markedSlices{g.ResourceV1Interface.ResourceSlices()}
}

type markedSlices struct {
	resourceclient.ResourceSliceInterface
}

func (s markedSlices) Create(ctx context.Context, slice *resourceapi.ResourceSlice, opts metav1.CreateOptions) (*resourceapi.ResourceSlice, error) {
	slice = slice.DeepCopy()
	slice.OwnerReferences = nil
	if slice.Labels == nil {
		slice.Labels = map[string]string{}
	}
	slice.Labels[sliceLabel] = "nodes"
	return s.ResourceSliceInterface.Create(ctx, slice, opts)
}

// removeSlices removes every slice with the bench's label, also where ctx has
// ended.
func removeSlices(ctx context.Context, client kubernetes.Interface) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWithin)
	defer cancel()
	marked := metav1.ListOptions{LabelSelector: sliceLabel}
	if err := client.ResourceV1().ResourceSlices().DeleteCollection(ctx, metav1.DeleteOptions{}, marked); err != nil {
		return fmt.Errorf("remove the bench's slices (label %s): %w", sliceLabel, err)
	}
	return nil
}
