package bench

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/hearth-dev/hearth/dradriver"
	"github.com/hearth-dev/hearth/dradriver/device"
)

// publishChanges is how many changes of one GPU a round of the publish row makes.
const publishChanges = 40

// publishRow is the time from a change of a GPU to its slice at the API server.
func (r *draRig) publishRow(ctx context.Context, pairs int) (Row, error) {
	client, err := kubernetes.NewForConfig(&rest.Config{Host: r.url, QPS: -1})
	if err != nil {
		return Row{}, fmt.Errorf("make client: %w", err)
	}
	p, err := dradriver.NewPublisher(dradriver.PublisherOptions{
		Node: draNode, Client: client, Pools: dradriver.Pools{GPUs: true}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return Row{}, err
	}
	running, end := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = p.Run(running) // nil, as it ends with its context
	}()
	defer func() {
		end()
		<-done
	}()
	changes := 0
	change := func() (time.Duration, error) {
		changes++
		return published(ctx, p, changes)
	}
	if _, err := change(); err != nil {
		return Row{}, err
	}
	own := func() (float64, error) {
		var took []float64
		for range publishChanges {
			d, err := change()
			if err != nil {
				return 0, err
			}
			took = append(took, ms(d))
		}
		return quantile(took, 0.99), nil
	}
	plain := func() (float64, error) { return rawUpdates(ctx, client) }
	return rounds(Row{
		Name: "publish_gpu_p99", Unit: "ms", Better: lower,
		Note: fmt.Sprintf("from a change of one of %d GPUs to its slice at an API server in memory; weights and KV wait for settled states besides (10 s)", draGPUs),
	}, pairs, own, contender{"one update of the same slice", plain})
}

// published changes a GPU of the offer and waits until the slices have it.
func published(ctx context.Context, p *dradriver.Publisher, n int) (time.Duration, error) {
	states := make(device.Snapshot, 0, draGPUs)
	for _, d := range draDevices() {
		states = append(states, device.State{Device: d})
	}
	states[0].Device.Memory += int64(n)
	return until(ctx, p, dradriver.Offer{GPUs: states})
}

// until offers something new and waits until the slices have it.
func until(ctx context.Context, p *dradriver.Publisher, offer dradriver.Offer) (time.Duration, error) {
	changed, cancel := p.Subscribe()
	defer cancel()
	writes := func(s dradriver.PublisherState) int64 { return s.Creates + s.Updates }
	before := writes(p.State())
	begin := time.Now()
	p.Set(offer)
	for {
		if s := p.State(); writes(s) > before && s.InSync() {
			return time.Since(begin), nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// rawUpdates gives the p99 of updating the node's first slice with nothing
// around it, in ms.
func rawUpdates(ctx context.Context, client kubernetes.Interface) (float64, error) {
	all, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil || len(all.Items) == 0 {
		return 0, fmt.Errorf("list slices: %d, %w", len(all.Items), err)
	}
	slice := all.Items[0].DeepCopy()
	slice.Name, slice.ResourceVersion, slice.UID = "raw", "", ""
	slice.Spec.Driver = "other.example"
	made, err := client.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{})
	if err != nil {
		return 0, fmt.Errorf("create slice: %w", err)
	}
	var took []float64
	for range publishChanges {
		begin := time.Now()
		if made, err = client.ResourceV1().ResourceSlices().Update(ctx, made, metav1.UpdateOptions{}); err != nil {
			return 0, fmt.Errorf("update slice: %w", err)
		}
		took = append(took, ms(time.Since(begin)))
	}
	if err := client.ResourceV1().ResourceSlices().Delete(ctx, "raw", metav1.DeleteOptions{}); err != nil {
		return 0, fmt.Errorf("delete slice: %w", err)
	}
	slices.Sort(took)
	return quantile(took, 0.99), nil
}
