package dradriver

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// ClusterFeatures is what the API server said of itself.
type ClusterFeatures struct {
	Version  string   `json:"version"` // "v1.37.2"; empty where nobody answered yet
	Features Features `json:"features"`
	// From says what the features follow: "probe" (what the API server keeps of
	// a slice that is sent as a dry run, and the minor for the rest) or "minor"
	// (the table alone, with Problem saying why).
	From    string `json:"from,omitempty"`
	Problem string `json:"problem,omitempty"`
}

// AskCluster asks the API server for its version, and for what it keeps of a
// slice of this node that uses everything: it is sent as a dry run, so nothing
// is ever stored. An error means that the API server did not answer; a dry run
// that it refuses is no error but leaves the features to the table.
func AskCluster(ctx context.Context, client kubernetes.Interface, node string) (ClusterFeatures, error) {
	version, err := serverVersion(ctx, client)
	if err != nil {
		return ClusterFeatures{}, err
	}
	minor, err := minorOf(version)
	if err != nil {
		return ClusterFeatures{}, err
	}
	c := ClusterFeatures{Version: version, Features: FeaturesOf(minor), From: "minor"}
	sent := probeSlice(node)
	kept, err := client.ResourceV1().ResourceSlices().Create(ctx, sent, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	switch {
	case ctx.Err() != nil:
		return ClusterFeatures{}, fmt.Errorf("probe features: %w", context.Cause(ctx))
	case err != nil:
		c.Problem = fmt.Sprintf("the dry run of a slice failed: %v", err)
		return c, nil
	case len(kept.Spec.Devices) != 1:
		c.Problem = "the dry run of a slice came back without its device"
		return c, nil
	}
	device := kept.Spec.Devices[0]
	c.From = "probe"
	c.Features.ConsumableCapacity = device.AllowMultipleAllocations != nil && device.Capacity[CapacitySize].RequestPolicy != nil
	c.Features.DeviceTaints = len(device.Taints) > 0
	return c, nil
}

func serverVersion(ctx context.Context, client kubernetes.Interface) (string, error) {
	info, err := discovery.ToServerVersionInterfaceWithContext(client.Discovery()).ServerVersionWithContext(ctx)
	if err != nil {
		return "", fmt.Errorf("ask server version: %w", err)
	}
	return info.GitVersion, nil
}

// minorOf reads the minor of "v1.37.2" or "v1.36.0-rc.1+vendor".
func minorOf(version string) (int, error) {
	fields := strings.SplitN(strings.TrimPrefix(version, "v"), ".", 3)
	if len(fields) < 2 || fields[0] != "1" {
		return 0, fmt.Errorf("read server version %q: want v1.MINOR", version)
	}
	minor, err := strconv.Atoi(strings.TrimRightFunc(fields[1], func(r rune) bool { return r < '0' || r > '9' }))
	if err != nil {
		return 0, fmt.Errorf("read server version %q: want v1.MINOR", version)
	}
	return minor, nil
}

// probeSlice uses every feature that an API server without its gate drops.
func probeSlice(node string) *resourceapi.ResourceSlice {
	yes := true
	zero, size := resource.MustParse("0"), resource.MustParse("1Mi")
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "hearth-probe-"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver:   Name,
			NodeName: &node,
			Pool:     resourceapi.ResourcePool{Name: PoolGPUs(node), Generation: 1, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{
				Name:                     "probe",
				AllowMultipleAllocations: &yes,
				Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
					CapacitySize: {Value: size, RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: &zero}},
				},
				Taints: []resourceapi.DeviceTaint{{Key: TaintPullFailed, Value: "Probe", Effect: resourceapi.DeviceTaintEffectNoSchedule}},
			}},
		},
	}
}

// droppedFeatures names what the slice controller saw the API server drop of a
// slice. It is empty for any other error.
func droppedFeatures(err error) []string {
	var dropped *resourceslice.DroppedFieldsError
	if !errors.As(err, &dropped) {
		return nil
	}
	names := dropped.DisabledFeatures()
	if len(names) == 0 {
		names = []string{"unknown"}
	}
	return names
}
