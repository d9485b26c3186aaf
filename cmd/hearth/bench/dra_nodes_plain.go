package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/hearth-dev/hearth/dradriver"
)

// plainDriver is the driver of the slices that are made with nothing around.
const plainDriver = "other.example"

// plainSlice is a slice of a node with devices.
func plainSlice(node int, driver string, like *resourceapi.ResourceSlice) *resourceapi.ResourceSlice {
	name := fmt.Sprintf("hearth-bench-plain-%03d", node)
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: name + "-"},
		Spec:       resourceapi.ResourceSliceSpec{Driver: driver, NodeName: &name, Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1}},
	}
	if like != nil {
		slice.Spec.Devices = like.Spec.Devices
		slice.Spec.Pool.Name += like.Spec.Pool.Name[len(*like.Spec.NodeName):]
	}
	return slice
}

// plainCreates makes slices like those of every node, of all nodes side by side,
// and gives the seconds that takes. Of each node the slice of the GPUs stays for
// plainUpdates.
func (n *nodes) plainCreates(ctx context.Context) (float64, error) {
	all, err := n.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{LabelSelector: sliceLabel})
	if err != nil {
		return 0, fmt.Errorf("list slices: %w", err)
	}
	of := map[string][]*resourceapi.ResourceSlice{}
	for i := range all.Items {
		if s := &all.Items[i]; s.Spec.NodeName != nil && s.Spec.Driver == dradriver.Name {
			of[*s.Spec.NodeName] = append(of[*s.Spec.NodeName], s)
		}
	}
	if len(of) != len(n.publishers) {
		return 0, fmt.Errorf("list slices: those of %d nodes, want %d", len(of), len(n.publishers))
	}
	var mu sync.Mutex
	group, ctx := errgroup.WithContext(ctx)
	begin := time.Now()
	node := 0
	for name, slices := range of {
		at := node
		node++
		group.Go(func() error {
			for _, like := range slices {
				made, err := n.client.ResourceV1().ResourceSlices().Create(ctx, plainSlice(at, plainDriver, like), metav1.CreateOptions{})
				if err != nil {
					return fmt.Errorf("create slice: %w", err)
				}
				if like.Spec.Pool.Name == dradriver.PoolGPUs(name) {
					mu.Lock()
					n.plain = append(n.plain, made)
					mu.Unlock()
				}
			}
			return nil
		})
	}
	err = group.Wait()
	return time.Since(begin).Seconds(), err
}

// plainUpdates updates one slice of each node, all at once, and gives the p99 of
// the calls in ms.
func (n *nodes) plainUpdates(ctx context.Context) (float64, error) {
	if len(n.plain) == 0 {
		return 0, errors.New("update slices: there are none")
	}
	times := make([]float64, len(n.plain))
	group, ctx := errgroup.WithContext(ctx)
	for i, slice := range n.plain {
		group.Go(func() error {
			begin := time.Now()
			slice = slice.DeepCopy()
			slice.Spec.Pool.Generation++
			made, err := n.client.ResourceV1().ResourceSlices().Update(ctx, slice, metav1.UpdateOptions{})
			if err != nil {
				return fmt.Errorf("update slice: %w", err)
			}
			times[i], n.plain[i] = ms(time.Since(begin)), made
			return nil
		})
	}
	err := group.Wait()
	return quantile(times, 0.99), err
}
