// Package fakekubelet plays the kubelet for a DRA driver, over the driver's own
// unix sockets and with the kubelet's generated clients: it finds the
// registration socket, registers the driver, prepares and unprepares claims and
// reads the health of devices. API plays the part of the API server that this
// needs. Tests and benches use it; it knows nothing of any one driver.
package fakekubelet

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	drahealthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drav1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// CallTimeout is what the kubelet gives a call.
const CallTimeout = 45 * time.Second

// Claim names a claim as the kubelet does.
type Claim struct{ Namespace, Name, UID string }

// Answer is what the driver said of one claim.
type Answer struct {
	Err     string   // empty where it is prepared
	Devices []Device // in the driver's order
}

// Device is one prepared device.
type Device struct {
	Requests            []string
	Pool, Name, ShareID string
	CDI                 []string
}

// Plugin is a driver that is registered.
type Plugin struct {
	Name     string
	Endpoint string   // path of its socket
	Versions []string // services that it announced
	conn     *grpc.ClientConn
}

// Register waits until the driver's registration socket is there and answers,
// as the kubelet's watcher does, and accepts the driver.
func Register(ctx context.Context, registrarDir, driver string) (*Plugin, error) {
	info, err := register(ctx, filepath.Join(registrarDir, driver+"-reg.sock"), &registration.RegistrationStatus{PluginRegistered: true})
	if err != nil {
		return nil, fmt.Errorf("register %s: %w", driver, err)
	}
	if info.GetType() != registration.DRAPlugin || info.GetName() != driver {
		return nil, fmt.Errorf("register %s: it is %s %s", driver, info.GetType(), info.GetName())
	}
	conn, err := dial(info.GetEndpoint())
	if err != nil {
		return nil, fmt.Errorf("register %s: %w", driver, err)
	}
	return &Plugin{Name: driver, Endpoint: info.GetEndpoint(), Versions: info.GetSupportedVersions(), conn: conn}, nil
}

// Refuse does as Register, and tells the driver that it was refused.
func Refuse(ctx context.Context, registrarDir, driver, reason string) error {
	_, err := register(ctx, filepath.Join(registrarDir, driver+"-reg.sock"), &registration.RegistrationStatus{Error: reason})
	return err
}

func register(ctx context.Context, socket string, status *registration.RegistrationStatus) (info *registration.PluginInfo, err error) {
	conn, err := dial(socket)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	client := registration.NewRegistrationClient(conn)
	info, err = client.GetInfo(ctx, &registration.InfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}
	_, err = client.NotifyRegistrationStatus(ctx, status)
	return info, err
}

func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(grpc.ConnectParams{
		// A socket that is not there yet is there soon.
		Backoff:           backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.6, MaxDelay: 200 * time.Millisecond},
		MinConnectTimeout: time.Second,
	}))
}

// Close ends the connection.
func (p *Plugin) Close() error { return p.conn.Close() }

// Prepare makes one call with all the claims.
func (p *Plugin) Prepare(ctx context.Context, claims ...Claim) (map[string]Answer, error) {
	resp, err := drav1.NewDRAPluginClient(p.conn).NodePrepareResources(ctx, &drav1.NodePrepareResourcesRequest{Claims: named(claims)})
	if err != nil {
		return nil, err
	}
	return answers(resp), nil
}

// PrepareBeta does as Prepare with the protocol's older version.
func (p *Plugin) PrepareBeta(ctx context.Context, claims ...Claim) (map[string]Answer, error) {
	req := &drav1beta1.NodePrepareResourcesRequest{}
	for _, c := range claims {
		req.Claims = append(req.Claims, &drav1beta1.Claim{Namespace: c.Namespace, Name: c.Name, Uid: c.UID})
	}
	resp, err := drav1beta1.NewDRAPluginClient(p.conn).NodePrepareResources(ctx, req)
	if err != nil {
		return nil, err
	}
	all := map[string]Answer{}
	for uid, r := range resp.GetClaims() {
		a := Answer{Err: r.GetError()}
		for _, d := range r.GetDevices() {
			a.Devices = append(a.Devices, Device{Requests: d.GetRequestNames(), Pool: d.GetPoolName(), Name: d.GetDeviceName(), CDI: d.GetCdiDeviceIds()})
		}
		all[uid] = a
	}
	return all, nil
}

func answers(resp *drav1.NodePrepareResourcesResponse) map[string]Answer {
	all := map[string]Answer{}
	for uid, r := range resp.GetClaims() {
		a := Answer{Err: r.GetError()}
		for _, d := range r.GetDevices() {
			a.Devices = append(a.Devices, Device{
				Requests: d.GetRequestNames(), Pool: d.GetPoolName(), Name: d.GetDeviceName(), ShareID: d.GetShareId(), CDI: d.GetCdiDeviceIds(),
			})
		}
		all[uid] = a
	}
	return all
}

// Unprepare makes one call with all the claims; the answer has the error of
// each, empty where it is unprepared.
func (p *Plugin) Unprepare(ctx context.Context, claims ...Claim) (map[string]string, error) {
	resp, err := drav1.NewDRAPluginClient(p.conn).NodeUnprepareResources(ctx, &drav1.NodeUnprepareResourcesRequest{Claims: named(claims)})
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	for uid, r := range resp.GetClaims() {
		all[uid] = r.GetError()
	}
	return all, nil
}

func named(claims []Claim) []*drav1.Claim {
	list := make([]*drav1.Claim, 0, len(claims))
	for _, c := range claims {
		list = append(list, &drav1.Claim{Namespace: c.Namespace, Name: c.Name, Uid: c.UID})
	}
	return list
}

// Health reads the driver's health reports until each of them was seen to
// satisfy, or ctx ends.
func (p *Plugin) Health(ctx context.Context, satisfied func(pool, device, health, text string) bool) error {
	if !slices.Contains(p.Versions, drahealthv1.DRAResourceHealthService) {
		return fmt.Errorf("read health: %s announces %v", p.Name, p.Versions)
	}
	stream, err := drahealthv1.NewDRAResourceHealthClient(p.conn).NodeWatchResources(ctx, &drahealthv1.NodeWatchResourcesRequest{})
	if err != nil {
		return fmt.Errorf("read health: %w", err)
	}
	for {
		report, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("read health: %w", err)
		}
		for _, d := range report.GetDevices() {
			if satisfied(d.GetDevice().GetPoolName(), d.GetDevice().GetDeviceName(), d.GetHealth().String(), d.GetMessage()) {
				return nil
			}
		}
	}
}

// PrepareUntil prepares one claim as the kubelet does that asks again until it
// is ready.
func (p *Plugin) PrepareUntil(ctx context.Context, every time.Duration, claim Claim) (Answer, error) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		call, cancel := context.WithTimeout(ctx, CallTimeout)
		all, err := p.Prepare(call, claim)
		cancel()
		if err == nil && all[claim.UID].Err == "" {
			return all[claim.UID], nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if err == nil {
				err = errors.New(all[claim.UID].Err)
			}
			return Answer{}, errors.Join(ctx.Err(), err)
		}
	}
}
